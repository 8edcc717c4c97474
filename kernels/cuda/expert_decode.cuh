// Routed experts for few tokens: a block computes one panel (32 rows) of gate and up, or of down, of one
// expert for all tokens routed to it, so every weight is read once from wherever the expert lies. Sums are
// added in an order fixed by K and format: no atomics, and a token's result does not depend on the other
// tokens of its expert.
#pragma once

#include "expert_layer.h"
#include "launch_shapes.h"
#include "machine.cuh"
#include "panel_products.h"

namespace twofold::cuda {

// Room for registers: one token needs loads under way (80 registers; nibbles under one f16 alone make do with 64, and a format
// may need two more in down), eight tokens need sums (up to 255).
template <WeightFormat F>
constexpr int blocks_per_multiprocessor(int tokens, int threads) {
  int of_one_token = 768;
  if constexpr (kernels::is_integer<FormatOf<F>>) {
    using Format = FormatOf<F>;
    if (Format::kBits == 4 && Format::kSubblocks == 1 && !Format::kMin && !kernels::has_table<Format>)
      of_one_token = 1024;
    if constexpr (requires { Format::kDeviceDownThreads; }) {
      if (threads == kDownThreads) of_one_token = Format::kDeviceDownThreads;
    }
  }
  return (tokens == 1 ? of_one_token : 256) / threads;
}

// Copies the encoded rows of a token tile into shared memory, 16 bytes at a time.
__device__ inline void load_rows(const uint8_t* rows, int64_t row_bytes, const int32_t* pairs, int count,
                                 int divisor, uint8_t* shared) {
  const int chunks = int(row_bytes / 16);
  for (int i = threadIdx.x; i < count * chunks; i += blockDim.x) {
    const int t = i / chunks, chunk = i % chunks;
    const uint8_t* row = rows + int64_t(pairs[t] / divisor) * row_bytes;
    reinterpret_cast<uint4*>(shared)[i] = reinterpret_cast<const uint4*>(row)[chunk];
  }
}

// One thread's units of one panel, then the sums of the warp to shared memory: sums[warp][token][row].
template <WeightFormat F, int kTokens>
__device__ inline void multiply_panel(const uint8_t* panel, const DecodeLane& at, int K, const uint8_t* x,
                                      int64_t row_bytes, int count, float* sums) {
  float acc[kTokens][kRowsOfLane] = {};
  const int units = num_units(F, K);
#pragma unroll 1  // a unit is enough loads under way; more would spill
  for (int unit = at.slot; unit < units; unit += kSlots) {
    UnitProduct<F, kTokens>::add(panel, unit, at.quad, K, x, row_bytes, count, acc);
  }
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= count) continue;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      float sum = acc[t][r];
      sum += __shfl_xor_sync(0xffffffffu, sum, kQuads);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2 * kQuads);
      if (lane < kQuads) sums[(warp * kTokens + t) * kernels::kPanelRows + 4 * lane + r] = sum;
    }
  }
}

// The sum over a matrix's warps, in order.
template <int kTokens>
__device__ inline float total(const float* sums, int first_warp, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarpsOfMatrix; ++w)
    sum += sums[((first_warp + w) * kTokens + token) * kernels::kPanelRows + row];
  return sum;
}

// The bias of a row, at `place` + row of an expert's (expert.h); of a row that is not there, and without any: 0.
__device__ inline float bias_of(const ExpertLayout& layout, const uint8_t* expert, int64_t place, int row,
                                int rows) {
  if (layout.bias_offset == 0 || row >= rows) return 0.0f;
  return reinterpret_cast<const float*>(expert + layout.bias_offset)[place + row];
}

// A panel's 32 values of one token, one per lane, as the activations that the next matrix takes.
template <ActivationKind kKind>
__device__ inline void store_encoded(float value, uint8_t* row, int column, int P) {
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kKind == ActivationKind::kF32) {
    reinterpret_cast<float*>(row)[column + lane] = value;
  } else if constexpr (kKind == ActivationKind::kBF16) {
    reinterpret_cast<uint16_t*>(row)[column + lane] = bf16_of_float(value);
  } else {
    // Magnitudes as bits: a NaN is above everything, where fmaxf would drop it.
    uint32_t peak = bits_of_float(value) & 0x7fffffffu;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) peak = max(peak, __shfl_xor_sync(0xffffffffu, peak, step));
    const float largest = float_of_bits(peak);
    const float scale = q8_scale(largest);
    const int q = q8_of(value, largest);
    int sum = q;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    row[column + lane] = uint8_t(int8_t(q));
    if (lane == 0) reinterpret_cast<float*>(row + P)[column / 32] = scale;
    if (lane % 16 == 0) reinterpret_cast<int32_t*>(row + P + P / 8)[column / 16 + lane / 16] = sum;
  }
}

// h[pair] = encoded(gated(gate . x, up . x)) with biases and adapters' parts added first, x being the token's encoded row.
template <WeightFormat F, int kTokens>
__global__ void __launch_bounds__(kGateUpThreads, blocks_per_multiprocessor<F>(kTokens, kGateUpThreads))
    gate_up_kernel(ExpertLayout layout, ExpertGroups groups, const uint8_t* x, int64_t row_bytes, int top_k,
                   int tile_tokens, uint8_t* out, int64_t out_row_bytes, float* adapted) {
  uint8_t* shared = dynamic_shared<uint8_t>();
  const int panels = (layout.intermediate + kernels::kPanelRows - 1) / kernels::kPanelRows;
  const DecodeItem item = decode_item(blockIdx.x, panels);
  if (item.group >= *groups.num_groups) return;
  const DecodeLane at = decode_lane(threadIdx.x);
  const uint8_t* expert = reinterpret_cast<const uint8_t*>(groups.weights[item.group]);
  const uint8_t* panel =
      expert + (at.matrix ? layout.up_offset : 0) + item.panel * kernels::panel_bytes(F, layout.hidden);
  float* sums = reinterpret_cast<float*>(shared + tile_tokens * row_bytes);
  const int end = groups.begin[item.group + 1];
  const int P = int(kernels::activation_columns(layout.intermediate));
  for (int first = groups.begin[item.group]; first < end; first += tile_tokens) {
    const int count = min(tile_tokens, end - first);
    load_rows(x, row_bytes, groups.pairs + first, count, top_k, shared);
    __syncthreads();
    multiply_panel<F, kTokens>(panel, at, layout.hidden, shared, row_bytes, count, sums);
    __syncthreads();
    const int lane = threadIdx.x % kWarpSize, row_of_lane = item.panel * kernels::kPanelRows + lane;
    // Read again: kept over the products it costs the registers that Q5_K has not on sm_80.
    const auto* biases = reinterpret_cast<const uint8_t*>(groups.weights[item.group]);
    const float gate_bias = bias_of(layout, biases, 0, row_of_lane, layout.intermediate);
    const float up_bias =
        bias_of(layout, biases, kernels::up_bias_at(layout.intermediate), row_of_lane, layout.intermediate);
    for (int t = threadIdx.x / kWarpSize; t < count; t += kGateUpThreads / kWarpSize) {
      float gate = total<kTokens>(sums, 0, t, lane) + gate_bias;
      float up = total<kTokens>(sums, kWarpsOfMatrix, t, lane) + up_bias;
      if (adapted != nullptr && row_of_lane < layout.intermediate) {
        const float* parts =
            adapted + int64_t(groups.pairs[first + t]) * 2 * layout.intermediate + row_of_lane;
        gate += parts[0];
        up += parts[layout.intermediate];
      }
      const float h = kernels::gated(layout.activation, layout.limit, gate, up, FastExp());
      if (adapted != nullptr && row_of_lane < layout.intermediate)
        adapted[int64_t(groups.pairs[first + t]) * 2 * layout.intermediate + row_of_lane] = h;
      uint8_t* row = out + int64_t(groups.pairs[first + t]) * out_row_bytes;
      store_encoded<activation_of(F)>(h, row, item.panel * kernels::kPanelRows, P);
      if (item.panel == panels - 1) {  // zeros after the last column
        for (int column = panels * kernels::kPanelRows; column < P; column += kernels::kPanelRows)
          store_encoded<activation_of(F)>(0.0f, row, column, P);
      }
    }
    __syncthreads();
  }
}

// outputs[pair] = down . h[pair] + bias.
template <WeightFormat F, int kTokens>
__global__ void __launch_bounds__(kDownThreads, blocks_per_multiprocessor<F>(kTokens, kDownThreads))
    down_kernel(ExpertLayout layout, ExpertGroups groups, const uint8_t* h, int64_t row_bytes,
                int tile_tokens, float* outputs) {
  uint8_t* shared = dynamic_shared<uint8_t>();
  const int panels = (layout.hidden + kernels::kPanelRows - 1) / kernels::kPanelRows;
  const DecodeItem item = decode_item(blockIdx.x, panels);
  if (item.group >= *groups.num_groups) return;
  const DecodeLane at = decode_lane(threadIdx.x);
  const uint8_t* expert = reinterpret_cast<const uint8_t*>(groups.weights[item.group]);
  const uint8_t* panel =
      expert + layout.down_offset + item.panel * kernels::panel_bytes(F, layout.intermediate);
  float* sums = reinterpret_cast<float*>(shared + tile_tokens * row_bytes);
  const int end = groups.begin[item.group + 1];
  for (int first = groups.begin[item.group]; first < end; first += tile_tokens) {
    const int count = min(tile_tokens, end - first);
    load_rows(h, row_bytes, groups.pairs + first, count, 1, shared);
    __syncthreads();
    multiply_panel<F, kTokens>(panel, at, layout.intermediate, shared, row_bytes, count, sums);
    __syncthreads();
    const int row = item.panel * kernels::kPanelRows + threadIdx.x % kWarpSize;
    const auto* biases = reinterpret_cast<const uint8_t*>(groups.weights[item.group]);
    const float bias =
        bias_of(layout, biases, kernels::down_bias_at(layout.intermediate), row, layout.hidden);
    for (int t = threadIdx.x / kWarpSize; t < count && row < layout.hidden; t += kDownThreads / kWarpSize)
      outputs[int64_t(groups.pairs[first + t]) * layout.hidden + row] =
          total<kTokens>(sums, 0, t, threadIdx.x % kWarpSize) + bias;
    __syncthreads();
  }
}

template <WeightFormat F>
int run_gate_up(const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers,
                int num_tokens, int top_k, int num_experts, int shared_bytes, Stream stream) {
  constexpr int kWarps = kGateUpThreads / kWarpSize;
  const int64_t row_bytes = kernels::activation_row_bytes(activation_of(F), layout.hidden);
  const int64_t out_bytes = kernels::activation_row_bytes(activation_of(F), layout.intermediate);
  const int panels = int(kernels::num_panels(layout.intermediate));
  const int blocks = max_groups(num_tokens * top_k, num_experts) * panels;
  const uint8_t* x = static_cast<const uint8_t*>(buffers.encoded);
  uint8_t* h = static_cast<uint8_t*>(buffers.intermediate);
  if (num_tokens == 1) {
    const int64_t bytes = row_bytes + decode_sum_bytes(kWarps, 1);
    if (bytes > shared_bytes) return cudaErrorInvalidValue;
    return launch(gate_up_kernel<F, 1>, blocks, kGateUpThreads, bytes, stream, layout, groups, x, row_bytes,
                  top_k, 1, h, out_bytes, buffers.adapted);
  } else {
    const int64_t sum_bytes = decode_sum_bytes(kWarps, kDecodeTokens);
    const int tile = decode_tile_tokens(row_bytes, kWarps, shared_bytes - sum_bytes);
    if (tile == 0) return cudaErrorInvalidValue;
    const int64_t bytes = tile * row_bytes + sum_bytes;
    return launch(gate_up_kernel<F, kDecodeTokens>, blocks, kGateUpThreads, bytes, stream, layout, groups, x,
                  row_bytes, top_k, tile, h, out_bytes, buffers.adapted);
  }
}

template <WeightFormat F>
int run_down(const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers,
             int num_tokens, int top_k, int num_experts, int shared_bytes, Stream stream) {
  constexpr int kWarps = kDownThreads / kWarpSize;
  const int64_t row_bytes = kernels::activation_row_bytes(activation_of(F), layout.intermediate);
  const int panels = int(kernels::num_panels(layout.hidden));
  const int blocks = max_groups(num_tokens * top_k, num_experts) * panels;
  const uint8_t* h = static_cast<const uint8_t*>(buffers.intermediate);
  if (num_tokens == 1) {
    const int64_t bytes = row_bytes + decode_sum_bytes(kWarps, 1);
    if (bytes > shared_bytes) return cudaErrorInvalidValue;
    return launch(down_kernel<F, 1>, blocks, kDownThreads, bytes, stream, layout, groups, h, row_bytes, 1,
                  buffers.outputs);
  } else {
    const int64_t sum_bytes = decode_sum_bytes(kWarps, kDecodeTokens);
    const int tile = decode_tile_tokens(row_bytes, kWarps, shared_bytes - sum_bytes);
    if (tile == 0) return cudaErrorInvalidValue;
    const int64_t bytes = tile * row_bytes + sum_bytes;
    return launch(down_kernel<F, kDecodeTokens>, blocks, kDownThreads, bytes, stream, layout, groups, h,
                  row_bytes, tile, buffers.outputs);
  }
}

// One instance per format; expert_decode_*.cu share them out, so that they compile side by side.
using DecodeRunner = int (*)(const ExpertLayout&, const ExpertGroups&, const ExpertBuffers&, int, int, int,
                             int, Stream);
struct DecodeRunners {
  DecodeRunner gate_up = nullptr;
  DecodeRunner down = nullptr;
};
// Runners for one share of the formats (Share); empty for other formats.
DecodeRunners float_decode_runners(WeightFormat format);
DecodeRunners integer_decode_runners(WeightFormat format);  // blocks of subblocks: q8_0, mxfp4 …
DecodeRunners k_decode_runners(WeightFormat format);        // q4_k, q5_k, q6_k;

template <WeightFormat F>
DecodeRunners runners_of() {
  return {&run_gate_up<F>, &run_down<F>};
}

}  // namespace twofold::cuda
