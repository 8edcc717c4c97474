// What the expert kernels are told of a layer, and the launchers. Plain C++: callers need no CUDA compiler.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch_shapes.h"
#include "placement.h"
#include "twofold/packed_kernels.h"
#include "twofold/weight_format.h"

struct CUstream_st;

namespace twofold::cuda {

// One expert as it lies in its slot or in the host's store: panels of gate, up and down.
struct ExpertLayout {
  kernels::WeightFormat gate_up;  // gate and up share a format
  kernels::WeightFormat down;
  int hidden;
  int intermediate;
  int64_t up_offset;  // of the panels, in bytes from the expert's start; gate begins it
  int64_t down_offset;
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
// a kernel: a copy would queue behind uploads that the layer does not wait for.
int launch_read_host(const void* mapped, void* to, int64_t bytes, Stream stream);

// bf16 rows [num_tokens][hidden] -> encoded activation rows of `kind`.
int launch_encode(kernels::ActivationKind kind, const void* bf16_rows, int num_tokens, int columns, void* out,
                  Stream stream);

// Decode, 1 to 32 tokens (more work, in rising cost): outputs[pair] = expert of the pair applied to token
// pair / top_k, for the pairs in groups. num_pairs and num_experts bound the launch.
int launch_decode_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                          const ExpertBuffers& buffers, int num_tokens, int top_k, int num_experts,
                          int shared_bytes, Stream stream);

// The tiles of a prefill launch, in device memory: {group, first pair within it}, see tile_groups.
struct PrefillTiles {
  const int32_t* tiles;  // [count][2]
  int count;
  int tokens;  // of a tile: kFewTokens or kManyTokens
};

// Prefill: the same on tensor cores, activations and dequantised weights in bf16. x is bf16 [tokens][hidden].
// f32 weights are not for tensor cores: cudaErrorInvalidValue.
int launch_prefill_experts(const ExpertLayout& layout, const ExpertGroups& groups,
                           const ExpertBuffers& buffers, const PrefillTiles& tiles, const void* x,
                           int num_tokens, int top_k, Stream stream);

// hidden[t] += sum over the ranks that the device computed of weights[t, k] * outputs[t, k], in rank order;
// then + from_cpu[t] where tokens have experts on the CPU, by where[pair] (placement.h). from_cpu
// [tokens][hidden] may be null. hidden is f32. joined_ns: where the device's time at its begin goes, may be
// null.
int launch_combine(const float* outputs, const float* weights, const uint8_t* where, const float* from_cpu,
                   int num_tokens, int top_k, int hidden_size, float* hidden, int64_t* joined_ns,
                   Stream stream);

}  // namespace twofold::cuda
