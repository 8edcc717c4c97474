// Multi-head latent attention of one query per sequence: each block takes 256 positions, or entries of a list of chosen
// positions, for 16 heads (8 where latents are long) and leaves maximum, sum and weighted latents; a second kernel joins
// the splits in order. A row of the cache is read once for all heads of a block, as keys and as values.

#include "attended_positions.h"
#include "machine.cuh"
#include "mla_lanes.h"
#include "mla_layer.h"

namespace twofold::cuda {

namespace {

constexpr int kStoreThreads = 128;
constexpr int kStoreWarps = kStoreThreads / kWarpSize;

template <int kLatent, bool kChosen>
__global__ void __launch_bounds__(kMlaThreads)
    mla_split_kernel(MlaDecode decode, MlaPages pages, float* workspace, int splits) {
  using Tile = MlaTile<kLatent>;
  uint32_t* memory = dynamic_shared<uint32_t>();
  const int sequence = blockIdx.z, thread = threadIdx.x;
  const auto [begin, length, list] =
      attended<kChosen>(decode.chosen, decode.select, sequence, decode.seq_lens[sequence], 0, 1);
  const SplitRange range = split_range(blockIdx.x, length, begin);
  if (range.begin >= range.end) return;
  const int cached = pages.latent + pages.rope, head = int(blockIdx.y) * Tile::kHeads;
  const Tile tile(memory, cached, pages.latent, min(Tile::kHeads, decode.num_heads - head));
  const int64_t row = int64_t(sequence) * decode.num_heads + head;
  const int32_t* table = decode.page_tables + int64_t(sequence) * decode.max_pages;
  mla_begin(tile, thread, static_cast<const uint16_t*>(decode.absorbed) + row * cached, decode.rule.scale);
  typename Tile::Sums sums = {};
  for (int first = range.begin; first < range.end; first += Tile::kChunk) {
    const int count = min(Tile::kChunk, range.end - first);
    mla_load(tile, thread, count, [&](int i) {
      const int position = kChosen ? list[first + i] : first + i;
      const int64_t slot =
          int64_t(table[position / pages.page_size]) * pages.page_size + position % pages.page_size;
      return reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(pages.rows) + slot * cached);
    });
    __syncthreads();
    mla_score(tile, thread, count);
    __syncthreads();
    if (!decode.rule.is_linear()) {
      mla_bend(tile, thread, count, decode.rule);
      __syncthreads();
    }
    mla_largest(tile, thread, count);
    __syncthreads();
    mla_weigh(tile, thread, count);
    __syncthreads();
    mla_sum(tile, thread, count, sums);
    __syncthreads();
  }
  mla_leave(tile, thread, sums, workspace, row, blockIdx.x, splits);
}

template <bool kChosen>
__global__ void mla_join_kernel(MlaDecode decode, float* workspace, int splits, int latent, uint16_t* out) {
  const int sequence = blockIdx.y;
  const int64_t row = int64_t(sequence) * decode.num_heads + blockIdx.x;
  const auto [first, length, list] =
      attended<kChosen>(decode.chosen, decode.select, sequence, decode.seq_lens[sequence], 0, 1);
  const float sink = decode.sinks != nullptr ? decode.sinks[blockIdx.x] : -INFINITY;
  for (int column = threadIdx.x; column < latent; column += blockDim.x) {
    out[row * latent + column] =
        bf16_of_float(mla_join(workspace, row, length, first, splits, latent, column, sink));
  }
}

__global__ void __launch_bounds__(kStoreThreads)
    mla_store_kernel(MlaRows rows, MlaPages pages, uint16_t* absorbed) {
  const int item = int(blockIdx.x) * kStoreWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (item >= rows.num_tokens * (rows.num_heads + 1)) return;
  const int token = item / (rows.num_heads + 1), head = item % (rows.num_heads + 1) - 1;
  const int latent = pages.latent, rope = pages.rope, cached = latent + rope;
  const float* cos = rows.cos == nullptr ? nullptr : rows.cos + int64_t(token) * (rope / 2);
  const float* sin = rows.sin + int64_t(token) * (rope / 2);
  if (head >= 0) {
    const int64_t row = int64_t(token) * rows.num_heads + head;
    const uint16_t* query = static_cast<const uint16_t*>(rows.queries) + row * (rows.nope + rope);
    mla_rotate(query + rows.nope, cos, sin, rope, rows.neighbours, lane, absorbed + row * cached + latent);
    return;
  }
  const int64_t slot = rows.slot_mapping[token];
  if (slot < 0) return;
  const uint16_t* from = static_cast<const uint16_t*>(rows.compressed) + int64_t(token) * rows.stride;
  uint16_t* to = static_cast<uint16_t*>(pages.rows) + slot * cached;
  float squares = mla_squares(from, latent, lane);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  mla_normalise(from, rows.norm, rsqrtf(squares / float(latent) + rows.epsilon), latent, lane, to);
  mla_rotate(from + latent, cos, sin, rope, rows.neighbours, lane, to + latent);
}

bool fits(const MlaPages& pages) {
  return pages.rows != nullptr && pages.page_size >= 1 && pages.latent >= 2 && pages.latent % 2 == 0 &&
         pages.latent <= kMlaMaxLatent && pages.rope >= 0 && pages.rope % 2 == 0;
}

template <int kLatent, bool kChosen>
int launch_split_and_join(const MlaDecode& decode, const MlaPages& pages, float* workspace, void* out,
                          Stream stream) {
  using Tile = MlaTile<kLatent>;
  const int shared = Tile::shared_bytes(pages.latent + pages.rope);
  const int splits = num_splits(most_attended(decode.chosen, decode.max_length));
  const dim3 grid(splits, Tile::head_blocks(decode.num_heads), decode.num_sequences);
  if (const int error = launch(mla_split_kernel<kLatent, kChosen>, grid, kMlaThreads, shared, stream, decode,
                               pages, workspace, splits))
    return error;
  return launch(mla_join_kernel<kChosen>, dim3(decode.num_heads, decode.num_sequences), kMlaThreads, 0,
                stream, decode, workspace, splits, pages.latent, static_cast<uint16_t*>(out));
}

template <int kLatent>
int launch_either(const MlaDecode& decode, const MlaPages& pages, float* workspace, void* out,
                  Stream stream) {
  const bool chosen = decode.chosen.positions != nullptr;
  const auto run = chosen ? launch_split_and_join<kLatent, true> : launch_split_and_join<kLatent, false>;
  return run(decode, pages, workspace, out, stream);
}

}  // namespace

int64_t mla_workspace_bytes(int num_sequences, int num_heads, int latent, int max_length) {
  return 4 * int64_t(num_sequences) * num_heads * num_splits(max_length) * (latent + 2);
}

int launch_mla_store(const MlaRows& rows, const MlaPages& pages, void* absorbed, Stream stream) {
  if (!fits(pages) || rows.compressed == nullptr || rows.queries == nullptr || rows.norm == nullptr ||
      (rows.cos == nullptr) != (rows.sin == nullptr) || rows.slot_mapping == nullptr || absorbed == nullptr ||
      rows.num_tokens < 1 || rows.num_heads < 1 || rows.nope < 1 || rows.stride < pages.latent + pages.rope) {
    return cudaErrorInvalidValue;
  }
  const int blocks = (rows.num_tokens * (rows.num_heads + 1) + kStoreWarps - 1) / kStoreWarps;
  return launch(mla_store_kernel, blocks, kStoreThreads, 0, stream, rows, pages,
                static_cast<uint16_t*>(absorbed));
}

int launch_mla_decode(const MlaDecode& decode, const MlaPages& pages, float* workspace, void* out,
                      Stream stream) {
  if (!fits(pages) || decode.absorbed == nullptr || decode.page_tables == nullptr ||
      decode.seq_lens == nullptr || workspace == nullptr || out == nullptr || decode.num_sequences < 1 ||
      decode.num_heads < 1 || decode.max_length < 1 ||
      int64_t(decode.max_pages) * pages.page_size < decode.max_length) {
    return cudaErrorInvalidValue;
  }
  const auto run =
      pages.latent <= kMlaUsualLatent ? launch_either<kMlaUsualLatent> : launch_either<kMlaMaxLatent>;
  return run(decode, pages, workspace, out, stream);
}

}  // namespace twofold::cuda
