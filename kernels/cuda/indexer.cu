// Learned indexer: a warp per token and head stores keys and rotates queries; a block scores 64 positions of a sequence for all
// heads; a block per sequence keeps the best positions, by their scores' bits from the highest byte on.

#include "indexer_layer.h"
#include "machine.cuh"
#include "number_formats.h"

namespace twofold::cuda {

namespace {

constexpr int kStoreThreads = 128;
constexpr int kStoreWarps = kStoreThreads / kWarpSize;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kPositions = 64;  // that a block scores
constexpr int kHeadGroups = kThreads / kPositions;
constexpr int kHeadsAtOnce = 4;  // of a thread
constexpr int kBins = 256;

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ inline float widened(const uint16_t* from, int i) {
  return float_of_bits(uint32_t(from[i]) << 16);
}

// `to` = the row of value(i), its first elements rotated.
template <class Value>
__device__ inline void rotate_row(const IndexRows& rows, int token, int head_dim, int lane, uint16_t* to,
                                  Value value) {
  const int half = rows.rotary / 2;
  for (int i = lane; i < half; i += kWarpSize) {
    const float a = value(rows.neighbours ? 2 * i : i), b = value(rows.neighbours ? 2 * i + 1 : half + i);
    const float c = rows.cos[int64_t(token) * half + i], s = rows.sin[int64_t(token) * half + i];
    to[i] = bf16_of_float(a * c - b * s);
    to[half + i] = bf16_of_float(b * c + a * s);
  }
  for (int i = rows.rotary + lane; i < head_dim; i += kWarpSize) to[i] = bf16_of_float(value(i));
}

__global__ void __launch_bounds__(kStoreThreads)
    index_store_kernel(IndexRows rows, IndexPages pages, uint16_t* rotated) {
  const int item = int(blockIdx.x) * kStoreWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (item >= rows.num_tokens * (rows.num_heads + 1)) return;
  const int token = item / (rows.num_heads + 1), head = item % (rows.num_heads + 1) - 1, D = pages.head_dim;
  if (head >= 0) {
    const int64_t row = (int64_t(token) * rows.num_heads + head) * D;
    const uint16_t* query = static_cast<const uint16_t*>(rows.queries) + row;
    rotate_row(rows, token, D, lane, rotated + row, [&](int i) { return widened(query, i); });
    return;
  }
  const int64_t slot = rows.slot_mapping[token];
  if (slot < 0) return;
  const uint16_t* key = static_cast<const uint16_t*>(rows.keys) + int64_t(token) * rows.stride;
  float sum = 0, squares = 0;
  for (int i = lane; i < D; i += kWarpSize) sum += widened(key, i);
  const float mean = warp_sum(sum) / float(D);
  for (int i = lane; i < D; i += kWarpSize) squares += (widened(key, i) - mean) * (widened(key, i) - mean);
  const float inverse = rsqrtf(warp_sum(squares) / float(D) + rows.epsilon);
  rotate_row(rows, token, D, lane, static_cast<uint16_t*>(pages.keys) + slot * D,
             [&](int i) { return (widened(key, i) - mean) * inverse * rows.norm[i] + rows.bias[i]; });
}

// Words of one key in shared memory: an odd number, so that equal words of neighbouring keys lie in different banks.
constexpr int row_words(int head_dim) { return (head_dim / 2) | 1; }
constexpr int64_t shared_bytes(int num_heads, int head_dim) {
  return 4 * (int64_t(num_heads) * (head_dim / 2 + 1) + kPositions * row_words(head_dim) + kThreads);
}

__global__ void __launch_bounds__(kThreads)
    index_score_kernel(IndexChoice choice, IndexPages pages, float* scores) {
  const int sequence = blockIdx.y, thread = threadIdx.x, first = int(blockIdx.x) * kPositions;
  const int count = min(kPositions, choice.seq_lens[sequence] - first);
  if (count <= 0) return;
  const int heads = choice.num_heads, words = pages.head_dim / 2, stride = row_words(pages.head_dim);
  uint32_t* const queries = dynamic_shared<uint32_t>();                         // [heads][words]
  uint32_t* const keys = queries + heads * words;                               // [kPositions][stride]
  float* const weights = reinterpret_cast<float*>(keys + kPositions * stride);  // [heads]
  float* const parts = weights + heads;                                         // [kHeadGroups][kPositions]
  const uint32_t* of_sequence =
      static_cast<const uint32_t*>(choice.queries) + int64_t(sequence) * heads * words;
  for (int i = thread; i < heads * words; i += kThreads) queries[i] = of_sequence[i];
  for (int i = thread; i < heads; i += kThreads)
    weights[i] = widened(static_cast<const uint16_t*>(choice.weights) + int64_t(sequence) * choice.stride, i);
  const int32_t* table = choice.page_tables + int64_t(sequence) * choice.max_pages;
  for (int i = thread; i < count * words; i += kThreads) {
    const int position = first + i / words;
    const int64_t slot =
        int64_t(table[position / pages.page_size]) * pages.page_size + position % pages.page_size;
    keys[i / words * stride + i % words] = static_cast<const uint32_t*>(pages.keys)[slot * words + i % words];
  }
  __syncthreads();
  const int position = thread % kPositions;
  const uint32_t* const key = keys + position * stride;
  float sum = 0;
  for (int head = thread / kPositions * kHeadsAtOnce; position < count && head < heads;
       head += kHeadGroups * kHeadsAtOnce) {
    float products[kHeadsAtOnce] = {};
    for (int word = 0; word < words; ++word) {
      const float low = bf16_low(key[word]), high = bf16_high(key[word]);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        const uint32_t pair = queries[min(head + h, heads - 1) * words + word];
        products[h] = fused(bf16_high(pair), high, fused(bf16_low(pair), low, products[h]));
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (head + h < heads) sum = fused(weights[head + h], fmaxf(products[h], 0.0f), sum);
    }
  }
  parts[thread] = sum;
  __syncthreads();
  if (thread >= count) return;
  for (int group = 1; group < kHeadGroups; ++group) sum += parts[group * kPositions + thread];
  scores[int64_t(sequence) * choice.max_length + first + thread] = sum;
}

// Ordered as the scores are; NaN is the least.
__device__ inline uint32_t ordered(float score) {
  if (!(score >= -INFINITY)) score = -INFINITY;
  const uint32_t bits = bits_of_float(score == 0.0f ? 0.0f : score);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

struct TopState {
  uint32_t bins[kBins];
  uint32_t least;  // of the kept scores: its highest bytes, so far
  int equals;      // positions with the least score that are kept
  int above_of[kWarps], equals_of[kWarps];
};

// The least kept score of `length`, and how many positions with it are kept.
__device__ inline void find_least(TopState& state, const float* scores, int length, int most, int thread) {
  if (thread == 0) {
    state.least = 0;
    state.equals = most;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = thread; bin < kBins; bin += kThreads) state.bins[bin] = 0;
    __syncthreads();
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8), least = state.least;
    for (int i = thread; i < length; i += kThreads) {
      const uint32_t score = ordered(scores[i]);
      if ((score & known) == least) atomicAdd(&state.bins[score >> shift & (kBins - 1)], 1u);
    }
    __syncthreads();
    if (thread == 0) {
      int bin = kBins - 1;
      for (; int(state.bins[bin]) < state.equals; --bin) state.equals -= int(state.bins[bin]);
      state.least |= uint32_t(bin) << shift;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) index_top_kernel(IndexChoice choice, const float* scores) {
  TopState& state = static_shared<TopState>();
  const int sequence = blockIdx.x, thread = threadIdx.x, warp = thread / kWarpSize;
  const int length = choice.seq_lens[sequence], most = choice.most;
  int32_t* const list = choice.positions + int64_t(sequence) * most;
  if (thread == 0) choice.counts[sequence] = min(length, most);
  if (length <= most) {
    for (int i = thread; i < length; i += kThreads) list[i] = i;
    return;
  }
  const float* const own = scores + int64_t(sequence) * choice.max_length;
  find_least(state, own, length, most, thread);
  const uint32_t least = state.least, before = (1u << thread % kWarpSize) - 1;
  int above = 0, equals = 0;  // of earlier positions
  for (int first = 0; first < length; first += kThreads) {
    const int i = first + thread;
    const uint32_t score = i < length ? ordered(own[i]) : 0;
    const uint32_t all_above = __ballot_sync(0xffffffffu, i < length && score > least);
    const uint32_t all_equal = __ballot_sync(0xffffffffu, i < length && score == least);
    if (thread % kWarpSize == 0) {
      state.above_of[warp] = __popc(all_above);
      state.equals_of[warp] = __popc(all_equal);
    }
    __syncthreads();
    int own_above = above + __popc(all_above & before), own_equals = equals + __popc(all_equal & before);
    for (int w = 0; w < kWarps; ++w) {
      own_above += w < warp ? state.above_of[w] : 0;
      own_equals += w < warp ? state.equals_of[w] : 0;
      above += state.above_of[w];
      equals += state.equals_of[w];
    }
    const bool kept = i < length && (score > least || (score == least && own_equals < state.equals));
    if (kept) list[own_above + min(own_equals, state.equals)] = i;
    __syncthreads();
  }
}

bool fits(const IndexPages& pages) {
  return pages.keys != nullptr && pages.page_size >= 1 && pages.head_dim >= 2 && pages.head_dim % 2 == 0;
}

}  // namespace

int launch_index_store(const IndexRows& rows, const IndexPages& pages, void* rotated, Stream stream) {
  if (!fits(pages) || rows.keys == nullptr || rows.queries == nullptr || rows.norm == nullptr ||
      rows.bias == nullptr || rows.cos == nullptr || rows.sin == nullptr || rows.slot_mapping == nullptr ||
      rotated == nullptr || rows.num_tokens < 1 || rows.num_heads < 1 || rows.stride < pages.head_dim ||
      rows.rotary < 0 || rows.rotary % 2 != 0 || rows.rotary > pages.head_dim) {
    return cudaErrorInvalidValue;
  }
  const int blocks = (rows.num_tokens * (rows.num_heads + 1) + kStoreWarps - 1) / kStoreWarps;
  return launch(index_store_kernel, blocks, kStoreThreads, 0, stream, rows, pages,
                static_cast<uint16_t*>(rotated));
}

int launch_index_choose(const IndexChoice& choice, const IndexPages& pages, float* scores, Stream stream) {
  if (!fits(pages) || choice.queries == nullptr || choice.weights == nullptr ||
      choice.page_tables == nullptr || choice.seq_lens == nullptr || choice.positions == nullptr ||
      choice.counts == nullptr || scores == nullptr || choice.num_sequences < 1 || choice.num_heads < 1 ||
      choice.most < 1 || choice.max_length < 1 ||
      int64_t(choice.max_pages) * pages.page_size < choice.max_length) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid((choice.max_length + kPositions - 1) / kPositions, choice.num_sequences);
  if (const int error = launch(index_score_kernel, grid, kThreads,
                               shared_bytes(choice.num_heads, pages.head_dim), stream, choice, pages, scores))
    return error;
  return launch(index_top_kernel, choice.num_sequences, kThreads, 0, stream, choice, scores);
}

}  // namespace twofold::cuda
