// Layer description for the expert kernels, and their launchers. Plain C++: callers need no CUDA compiler.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch_shapes.h"
#include "placement.h"
#include "twofold/expert.h"
#include "twofold/packed_kernels.h"
#include "twofold/weight_format.h"

struct CUstream_st;

namespace twofold::cuda {

// One expert as it lies in its slot or in the host's store: panels of gate, up and down, then biases (expert.h).
struct ExpertLayout {
  kernels::WeightFormat gate_up;  // gate and up share a format
  kernels::WeightFormat down;
  int hidden;
  int intermediate;
  int64_t up_offset;  // byte offset of the panels in the expert, which begins with gate
  int64_t down_offset;
  int64_t bias_offset = 0;  // 0: there are none
  kernels::ExpertActivation activation = kernels::ExpertActivation::kSilu;
  float limit = 0;  // bound of gate and up (expert.h); 0: none
};

// Pairs (token, rank) that the device computes, by expert. All arrays are device memory.
struct ExpertGroups {
  int32_t* num_groups;  // [1]
  uint64_t* weights;    // [groups] address of the expert: a slot, or host memory that the device reads
  int32_t* begin;       // [groups + 1] into pairs
  int32_t* pairs;       // [pairs] token * top_k + rank
  int capacity;         // groups that there is room for
};

// Buffers of a layer's compute, reused by all layers. All device memory.
struct ExpertBuffers {
  void* encoded;       // [tokens] rows of the activations that gate and up take
  void* intermediate;  // [pairs] rows of the activations that down takes
  float* outputs;      // [pairs][hidden]
  float* gate_up;      // prefill: [pairs][2][intermediate]
  // [pairs][2][intermediate]; null: no row uses an adapter (low_rank_layer.h). Holds what adapters add to gate and up of the
  // pairs in groups; receives each pair's h, as it was before rounding, in the first half.
  float* adapted = nullptr;
};

using Stream = ::CUstream_st*;  // cudaStream_t

// What the kernels take: all three matrices there, and one kind of activations for both products.
inline bool is_complete(const ExpertLayout& layout) {
  return layout.hidden > 0 && layout.intermediate > 0 && layout.up_offset > 0 && layout.down_offset > 0 &&
         activation_of(layout.gate_up) == activation_of(layout.down);
}

// Bytes of ExpertBuffers::encoded and ::intermediate that a layer needs.
inline int64_t encoded_bytes(const ExpertLayout& layout, int num_tokens) {
  return num_tokens * kernels::activation_row_bytes(activation_of(layout.gate_up), layout.hidden);
}
inline int64_t intermediate_bytes(const ExpertLayout& layout, int num_pairs) {
  // Prefill keeps bf16 rows there.
  const int64_t decode = kernels::activation_row_bytes(activation_of(layout.down), layout.intermediate);
  const int64_t prefill = kernels::activation_row_bytes(ActivationKind::kBF16, layout.intermediate);
  return num_pairs * (decode > prefill ? decode : prefill);
}

// All launchers return a cudaError_t as int (0: launched) and check their arguments first: a wrong one is
// cudaErrorInvalidValue (1).

// Brings bytes (a multiple of 16, both addresses aligned to it) from mapped host memory into device memory by
// a kernel: a copy would queue after uploads that the layer does not wait for.
int launch_read_host(const void* mapped, void* to, int64_t bytes, Stream stream);

// bf16 rows and where their encoded rows go.
struct EncodedRows {
  kernels::ActivationKind kind;
  const void* rows;  // bf16 [num_tokens][columns]
  int num_tokens;
  int columns;
  void* out;
};
int launch_encode(const EncodedRows& encoded, Stream stream);

// What bounds a decode launch.
struct DecodeShape {
  int num_tokens;  // 1 to 32 (more work, in rising cost)
  int top_k;
  int num_experts;
  int shared_bytes;  // shared memory that a block may take
};

inline bool can_decode(const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers,
                       const DecodeShape& shape) {
  return is_complete(layout) && shape.num_tokens >= 1 && shape.top_k >= 1 && shape.num_experts >= 1 &&
         groups.capacity >= max_groups(shape.num_tokens * shape.top_k, shape.num_experts) &&
         buffers.encoded != nullptr && buffers.intermediate != nullptr && buffers.outputs != nullptr;
}

// Decode: outputs[pair] = expert of the pair applied to token pair / top_k, for the pairs in groups.
int launch_decode_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                          const ExpertBuffers& buffers, const DecodeShape& shape, Stream stream);

// The tiles of a prefill launch, in device memory: {group, first pair within it}, see tile_groups.
struct PrefillTiles {
  const int32_t* tiles;  // [count][2]
  int count;
  int tokens;  // tokens per tile: kFewTokens or kManyTokens
};

struct PrefillRows {
  const void* x;  // bf16 [num_tokens][hidden]
  int num_tokens;
  int top_k;
};

// Prefill: the same on tensor cores, activations and dequantised weights in bf16.
// f32 weights are not for tensor cores: cudaErrorInvalidValue.
int launch_prefill_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                           const ExpertBuffers& buffers, const PrefillTiles& tiles, const PrefillRows& rows,
                           Stream stream);

// The device's and the CPU's outputs of a layer, and the hidden states they are added to.
struct CombinedLayer {
  const float* outputs;   // [pairs][hidden_size] of the device
  const float* weights;   // [pairs]
  const uint8_t* where;   // [pairs] where it is computed (placement.h)
  const float* from_cpu;  // [tokens][hidden_size], may be null
  int num_tokens;
  int top_k;
  int hidden_size;
  float* hidden;       // [tokens][hidden_size]
  int64_t* joined_ns;  // receives the device's time at the start of the launch, may be null
};

inline bool can_combine(const CombinedLayer& layer) {
  return layer.outputs != nullptr && layer.weights != nullptr && layer.where != nullptr &&
         layer.hidden != nullptr && layer.num_tokens >= 1 && layer.top_k >= 1 && layer.hidden_size >= 1;
}

// hidden[t] += sum over the ranks that the device computed of weights[t, k] * outputs[t, k], in rank order;
// then + from_cpu[t] where tokens have experts on the CPU.
int launch_combine(const CombinedLayer& layer, Stream stream);

}  // namespace twofold::cuda
