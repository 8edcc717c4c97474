// Low-rank products of adapters: A x by one warp for each rank of a row, then B t by one thread for each output.

#include "low_rank_layer.h"
#include "machine.cuh"
#include "number_formats.h"

namespace twofold::cuda {

namespace {

constexpr int kRankThreads = 256;
constexpr int kRanks = kRankThreads / kWarpSize;  // ranks per block
constexpr int kOutputThreads = 256;
constexpr int kMostBlocks = 65535;  // along y

__device__ inline float element(const void* values, bool is_f32, int64_t at) {
  if (is_f32) return static_cast<const float*>(values)[at];
  return float_of_bits(uint32_t(static_cast<const uint16_t*>(values)[at]) << 16);
}

__device__ inline bool is_here(const AdaptedRows& rows, int row) {
  return rows.where == nullptr || (rows.where[row] != kCpu && rows.where[row] != kPadding);
}

// Null: no adapter changes the row.
__device__ inline const LowRankFactors* factors_of(const LowRankTable& table, const AdaptedRows& rows,
                                                   int row) {
  const int adapter = rows.adapters[row / rows.per_token];
  if (adapter < 0) return nullptr;
  const int entry = rows.entries == nullptr ? row % rows.per_token : rows.entries[row];
  if (entry < 0) return nullptr;
  return table.factors + (int64_t(adapter) * table.num_entries + entry) * table.stride + table.first;
}

__global__ void __launch_bounds__(kRankThreads)
    low_rank_down_kernel(LowRankTable table, AdaptedRows rows, LowRankInput input, float* t) {
  const int row = int(blockIdx.x), lane = threadIdx.x % kWarpSize;
  const int at = int(blockIdx.y) * kRanks + threadIdx.x / kWarpSize;
  const int part = at / table.max_rank, rank = at % table.max_rank;
  if (part >= table.count || !is_here(rows, row)) return;
  const LowRankFactors* found = factors_of(table, rows, row);
  if (found == nullptr) return;
  const LowRankFactors& own = found[part];
  if (rank >= own.rank) return;
  const int64_t x = int64_t(row / input.divisor) * input.stride, a = int64_t(rank) * input.columns;
  const bool a_is_f32 = (own.is_f32 & 1) != 0;
  float sum = 0;
  for (int column = lane; column < input.columns; column += kWarpSize)
    sum = fused(element(own.a, a_is_f32, a + column), element(input.x, input.is_f32, x + column), sum);
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) t[(int64_t(row) * table.count + part) * table.max_rank + rank] = sum;
}

__global__ void __launch_bounds__(kOutputThreads)
    low_rank_gather_kernel(LowRankTable table, AdaptedRows rows, const int64_t* ids, float* t) {
  const int row = int(blockIdx.x), at = int(blockIdx.y) * kOutputThreads + threadIdx.x;
  const int part = at / table.max_rank, rank = at % table.max_rank;
  if (part >= table.count || !is_here(rows, row)) return;
  const LowRankFactors* found = factors_of(table, rows, row);
  if (found == nullptr) return;
  const LowRankFactors& own = found[part];
  if (rank < own.rank)
    t[(int64_t(row) * table.count + part) * table.max_rank + rank] =
        element(own.a, (own.is_f32 & 1) != 0, ids[row] * own.rank + rank);
}

__global__ void __launch_bounds__(kOutputThreads)
    low_rank_up_kernel(LowRankTable table, AdaptedRows rows, const float* t, LowRankOutput output) {
  const int row = int(blockIdx.x), column = int(blockIdx.y) * kOutputThreads + threadIdx.x;
  if (column >= output.width || !is_here(rows, row)) return;
  const LowRankFactors* own = factors_of(table, rows, row);
  if (own == nullptr && output.adds) return;
  float sum = 0;
  for (int part = 0; own != nullptr && part < table.count; ++part) {
    const LowRankFactors& factors = own[part];
    const int at = column - factors.first_row;
    if (factors.rank == 0 || at < 0 || at >= factors.rows) continue;
    const bool b_is_f32 = (factors.is_f32 & 2) != 0;
    const float* ranks = t + (int64_t(row) * table.count + part) * table.max_rank;
    for (int r = 0; r < factors.rank; ++r)
      sum = fused(element(factors.b, b_is_f32, int64_t(r) * factors.rows + at), ranks[r], sum);
  }
  const int64_t to = row * output.stride + column;
  if (output.is_f32) {
    float* y = static_cast<float*>(output.y) + to;
    *y = output.adds ? *y + sum : sum;
  } else {
    uint16_t* y = static_cast<uint16_t*>(output.y) + to;
    *y = bf16_of_float(output.adds ? float_of_bits(uint32_t(*y) << 16) + sum : sum);
  }
}

}  // namespace

int launch_low_rank_down(const LowRankTable& table, const AdaptedRows& rows, const LowRankInput& input,
                         float* t, Stream stream) {
  if (!can_adapt(table, rows, t) || input.x == nullptr || input.divisor < 1 || input.columns < 1)
    return cudaErrorInvalidValue;
  const int64_t blocks = (int64_t(table.count) * table.max_rank + kRanks - 1) / kRanks;
  if (blocks > kMostBlocks) return cudaErrorInvalidValue;
  const dim3 grid(unsigned(rows.num_tokens * rows.per_token), unsigned(blocks));
  return launch(low_rank_down_kernel, grid, kRankThreads, 0, stream, table, rows, input, t);
}

int launch_low_rank_gather(const LowRankTable& table, const AdaptedRows& rows, const int64_t* ids, float* t,
                           Stream stream) {
  if (!can_adapt(table, rows, t) || ids == nullptr) return cudaErrorInvalidValue;
  const int64_t blocks = (int64_t(table.count) * table.max_rank + kOutputThreads - 1) / kOutputThreads;
  if (blocks > kMostBlocks) return cudaErrorInvalidValue;
  const dim3 grid(unsigned(rows.num_tokens * rows.per_token), unsigned(blocks));
  return launch(low_rank_gather_kernel, grid, kOutputThreads, 0, stream, table, rows, ids, t);
}

int launch_low_rank_up(const LowRankTable& table, const AdaptedRows& rows, const float* t,
                       const LowRankOutput& output, Stream stream) {
  if (!can_adapt(table, rows, t) || output.y == nullptr || output.width < 1) return cudaErrorInvalidValue;
  const int64_t blocks = (int64_t(output.width) + kOutputThreads - 1) / kOutputThreads;
  if (blocks > kMostBlocks) return cudaErrorInvalidValue;
  const dim3 grid(unsigned(rows.num_tokens * rows.per_token), unsigned(blocks));
  return launch(low_rank_up_kernel, grid, kOutputThreads, 0, stream, table, rows, t, output);
}

}  // namespace twofold::cuda
