// Learned indexer: a warp per token and head stores keys and rotates queries; a warp per token stores the key of the pool that
// the token ends; a block scores 64 positions or pools of a sequence for all heads, or one block of positions for each
// head; a block per list keeps the best ones, by their scores' bits from the highest byte on.

#include <algorithm>

#include "indexer_layer.h"
#include "machine.cuh"
#include "number_formats.h"

namespace twofold::cuda {

namespace {

constexpr int kStoreThreads = 128;
constexpr int kStoreWarps = kStoreThreads / kWarpSize;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kPositions = 64;  // or pools, that a block scores
constexpr int kHeadGroups = kThreads / kPositions;
constexpr int kHeadsAtOnce = 4;  // heads whose products a thread sums together
constexpr int kBins = 256;

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ inline float widened(const uint16_t* from, int i) {
  return float_of_bits(uint32_t(from[i]) << 16);
}

struct Moments {
  float mean, inverse;  // 1 / the root of the mean square
};

// Mean and inverse deviation of value(0 … n - 1), by a warp; not centred: the mean is 0.
template <class Value>
__device__ inline Moments moments(int n, int lane, float epsilon, bool centred, Value value) {
  float sum = 0, squares = 0;
  for (int i = lane; i < n && centred; i += kWarpSize) sum += value(i);
  const float mean = warp_sum(sum) / float(n);
  for (int i = lane; i < n; i += kWarpSize) {
    const float distance = value(i) - mean;
    squares += distance * distance;
  }
  return {mean, rsqrtf(warp_sum(squares) / float(n) + epsilon)};
}

// Angles of one row.
struct Angles {
  const float *cos, *sin;
  int rotary;
  bool last, neighbours;
};

template <class Rows>
__device__ inline Angles angles_of(const Rows& rows, int token, bool last, bool neighbours) {
  const int64_t first = int64_t(token) * (rows.rotary / 2);
  return {rows.cos + first, rows.sin + first, rows.rotary, last, neighbours};
}

// `to` = the row of value(i), its first or last elements rotated.
template <class Value>
__device__ inline void rotate_row(const Angles& by, int head_dim, int lane, uint16_t* to, Value value) {
  const int half = by.rotary / 2, begin = by.last ? head_dim - by.rotary : 0;
  for (int i = lane; i < half; i += kWarpSize) {
    const float a = value(begin + (by.neighbours ? 2 * i : i));
    const float b = value(begin + (by.neighbours ? 2 * i + 1 : half + i));
    const float c = by.cos[i], s = by.sin[i];
    to[begin + i] = bf16_of_float(a * c - b * s);
    to[begin + half + i] = bf16_of_float(b * c + a * s);
  }
  for (int i = lane; i < head_dim - by.rotary; i += kWarpSize) {
    const int at = i < begin ? i : i + by.rotary;
    to[at] = bf16_of_float(value(at));
  }
}

__global__ void __launch_bounds__(kStoreThreads)
    index_store_kernel(IndexRows rows, IndexPages pages, uint16_t* rotated) {
  const int item = int(blockIdx.x) * kStoreWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (item >= rows.num_tokens * (rows.num_heads + 1)) return;
  const int token = item / (rows.num_heads + 1), head = item % (rows.num_heads + 1) - 1, D = pages.head_dim;
  const Angles angles = angles_of(rows, token, rows.rotates_last, rows.neighbours);
  if (head >= 0) {
    const int64_t row = (int64_t(token) * rows.num_heads + head) * D;
    const uint16_t* query = static_cast<const uint16_t*>(rows.queries) + row;
    const float* const norm = rows.query_norm;
    const Moments of = moments(D, lane, rows.epsilon, false, [&](int i) { return widened(query, i); });
    rotate_row(angles, D, lane, rotated + row,
               [&](int i) { return widened(query, i) * (norm == nullptr ? 1.0f : of.inverse * norm[i]); });
    return;
  }
  const int64_t slot = rows.slot_mapping[token];
  if (slot < 0) return;
  const uint16_t* key = static_cast<const uint16_t*>(rows.keys) + int64_t(token) * rows.stride;
  uint16_t* const kept = static_cast<uint16_t*>(pages.keys) + slot * D;
  if (rows.norm == nullptr) {
    for (int i = lane; i < D; i += kWarpSize) kept[i] = key[i];
    return;
  }
  const bool centred = rows.bias != nullptr;
  const Moments of = moments(D, lane, rows.epsilon, centred, [&](int i) { return widened(key, i); });
  rotate_row(angles, D, lane, kept, [&](int i) {
    const float normed = (widened(key, i) - of.mean) * of.inverse * rows.norm[i];
    return centred ? normed + rows.bias[i] : normed;
  });
}

__device__ inline int64_t slot_of(const int32_t* table, const IndexPages& pages, int position) {
  return int64_t(table[position / pages.page_size]) * pages.page_size + position % pages.page_size;
}

__global__ void __launch_bounds__(kStoreThreads) index_pool_kernel(IndexPools pools, IndexPages pages) {
  const int token = int(blockIdx.x) * kStoreWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (token >= pools.num_tokens) return;
  const int64_t slot = pools.slot_mapping[token];
  const int D = pages.head_dim, end = int(pools.positions[token]) + 1;
  if (slot < 0 || end % pools.pool != 0) return;
  const int sequence = pools.sequences != nullptr ? pools.sequences[token] : token;
  const int32_t* const table = pools.page_tables + int64_t(sequence) * pools.max_pages;
  uint16_t* const keys = static_cast<uint16_t*>(pages.keys);
  float* const mean = dynamic_shared<float>() + threadIdx.x / kWarpSize * D;
  for (int i = lane; i < D; i += kWarpSize) {
    float sum = 0;
    for (int p = end - pools.pool; p < end; ++p) sum += widened(keys + slot_of(table, pages, p) * D, i);
    mean[i] = sum / float(pools.pool);
  }
  __syncwarp();  // from here on the last position's key may be replaced
  const Moments of = moments(D, lane, pools.epsilon, false, [&](int i) { return mean[i]; });
  rotate_row(angles_of(pools, token, false, false), D, lane, keys + slot * D,
             [&](int i) { return mean[i] * of.inverse * pools.norm[i]; });
}

// Words of one key in shared memory: an odd number, so that equal words of neighbouring keys lie in different banks.
constexpr int row_words(int head_dim) { return (head_dim / 2) | 1; }
constexpr int64_t shared_bytes(int num_heads, int head_dim) {
  return 4 * (int64_t(num_heads) * (head_dim / 2 + 1) + kPositions * row_words(head_dim) + kThreads);
}

__device__ inline void load_queries(const IndexChoice& choice, int sequence, int words, uint32_t* queries) {
  const int count = choice.num_heads * words;
  const uint32_t* from = static_cast<const uint32_t*>(choice.queries) + int64_t(sequence) * count;
  for (int i = threadIdx.x; i < count; i += kThreads) queries[i] = from[i];
}

// `count` keys of a sequence: of positions from number `first` on, or of pools.
__device__ inline void load_keys(const IndexChoice& choice, const IndexPages& pages, int sequence, int first,
                                 int count, uint32_t* keys) {
  const int words = pages.head_dim / 2, stride = row_words(pages.head_dim);
  const int32_t* table = choice.page_tables + int64_t(sequence) * choice.max_pages;
  for (int i = threadIdx.x; i < count * words; i += kThreads) {
    const int number = first + i / words, position = choice.pooled ? (number + 1) * choice.block - 1 : number;
    const int64_t slot = slot_of(table, pages, position);
    keys[i / words * stride + i % words] = static_cast<const uint32_t*>(pages.keys)[slot * words + i % words];
  }
}

__global__ void __launch_bounds__(kThreads)
    index_score_kernel(IndexChoice choice, IndexPages pages, float* scores) {
  const int sequence = blockIdx.y, thread = threadIdx.x, first = int(blockIdx.x) * kPositions;
  const int count = min(kPositions, choice.num_blocks(choice.seq_lens[sequence]) - first);
  if (count <= 0) return;
  const int heads = choice.num_heads, words = pages.head_dim / 2, stride = row_words(pages.head_dim);
  uint32_t* const queries = dynamic_shared<uint32_t>();                         // [heads][words]
  uint32_t* const keys = queries + heads * words;                               // [kPositions][stride]
  float* const weights = reinterpret_cast<float*>(keys + kPositions * stride);  // [heads]
  float* const parts = weights + heads;                                         // [kHeadGroups][kPositions]
  load_queries(choice, sequence, words, queries);
  const auto* const given = static_cast<const uint16_t*>(choice.weights);
  for (int i = thread; i < heads; i += kThreads)
    weights[i] = given == nullptr ? 1.0f : widened(given + int64_t(sequence) * choice.stride, i);
  load_keys(choice, pages, sequence, first, count, keys);
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
  scores[int64_t(sequence) * choice.num_blocks(choice.max_length) + first + thread] = sum;
}

// The largest product of a block's keys for each head; a warp takes every eighth head.
__global__ void __launch_bounds__(kThreads)
    index_block_kernel(IndexChoice choice, IndexPages pages, float* scores) {
  const int sequence = blockIdx.y, block = blockIdx.x, heads = choice.num_heads;
  const int begin = block * choice.block, end = min(begin + choice.block, choice.seq_lens[sequence]);
  if (begin >= end) return;
  const int words = pages.head_dim / 2, stride = row_words(pages.head_dim);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  uint32_t* const queries = dynamic_shared<uint32_t>();                      // [heads][words]
  uint32_t* const keys = queries + heads * words;                            // [kPositions][stride]
  float* const best = reinterpret_cast<float*>(keys + kPositions * stride);  // [heads]
  load_queries(choice, sequence, words, queries);
  for (int first = begin; first < end; first += kPositions) {
    const int count = min(kPositions, end - first);
    load_keys(choice, pages, sequence, first, count, keys);
    __syncthreads();
    for (int head = warp; head < heads; head += kWarps) {
      float most = first == begin ? -INFINITY : best[head];
      for (int i = lane; i < count; i += kWarpSize) {
        float product = 0;
        for (int word = 0; word < words; ++word) {
          const uint32_t a = queries[head * words + word], b = keys[i * stride + word];
          product = fused(bf16_high(a), bf16_high(b), fused(bf16_low(a), bf16_low(b), product));
        }
        most = fmaxf(most, product);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
      __syncwarp();  // all lanes have read best[head]; shuffles order no memory
      if (lane == 0) best[head] = most;
      __syncwarp();
    }
    __syncthreads();
  }
  for (int head = threadIdx.x; head < heads; head += kThreads) {
    const int64_t row = int64_t(sequence) * heads + head;
    scores[row * choice.num_blocks(choice.max_length) + block] = best[head];
  }
}

// Ordered as the scores are; NaN is the least.
__device__ inline uint32_t ordered(float score) {
  if (!(score >= -INFINITY)) score = -INFINITY;
  const uint32_t bits = bits_of_float(score == 0.0f ? 0.0f : score);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

struct TopState {
  uint32_t bins[kBins];
  uint32_t least;  // highest bytes of the least kept score, as far as they are known
  int equals;      // positions with the least score that are kept
  int above_of[kWarps], equals_of[kWarps];
};

// One list's scores of blocks, or positions, of which the last `local` ones are above all others.
struct Ranked {
  const float* scores;
  int count, local;

  __device__ uint32_t operator[](int i) const { return i >= count - local ? ~0u : ordered(scores[i]); }
};

// The least kept score, and how many with it are kept.
__device__ inline void find_least(TopState& state, const Ranked& ranked, int most, int thread) {
  if (thread == 0) {
    state.least = 0;
    state.equals = most;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = thread; bin < kBins; bin += kThreads) state.bins[bin] = 0;
    __syncthreads();
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8), least = state.least;
    for (int i = thread; i < ranked.count; i += kThreads) {
      const uint32_t score = ranked[i];
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
  const int row = blockIdx.x, thread = threadIdx.x, warp = thread / kWarpSize, block = choice.block;
  const int length = choice.seq_lens[row / choice.num_lists()];
  int32_t* const list = choice.positions + int64_t(row) * choice.most;
  if (length <= choice.most) {
    if (thread == 0) choice.counts[row] = length;
    for (int i = thread; i < length; i += kThreads) list[i] = i;
    return;
  }
  if (choice.pooled) {  // positions after the last whole pool
    const int in_pools = choice.most / block * block, after = length % block;
    if (thread == 0) choice.counts[row] = in_pools + after;
    for (int i = thread; i < after; i += kThreads) list[in_pools + i] = length - after + i;
  }
  const Ranked ranked{scores + int64_t(row) * choice.num_blocks(choice.max_length), choice.num_blocks(length),
                      choice.local};
  find_least(state, ranked, choice.most / block, thread);
  const uint32_t least = state.least, before = (1u << thread % kWarpSize) - 1;
  int above = 0, equals = 0;  // of earlier entries
  for (int first = 0; first < ranked.count; first += kThreads) {
    const int i = first + thread;
    const uint32_t score = i < ranked.count ? ranked[i] : 0;
    const uint32_t all_above = __ballot_sync(0xffffffffu, i < ranked.count && score > least);
    const uint32_t all_equal = __ballot_sync(0xffffffffu, i < ranked.count && score == least);
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
    const bool kept = i < ranked.count && (score > least || (score == least && own_equals < state.equals));
    const int place = (own_above + min(own_equals, state.equals)) * block, begin = i * block;
    for (int p = begin; kept && p < min(begin + block, length); ++p) list[place + p - begin] = p;
    if (i == ranked.count - 1 && !choice.pooled)  // the last block may be shorter
      choice.counts[row] = choice.most - (kept ? begin + block - length : 0);
    __syncthreads();
  }
}

bool fits(const IndexPages& pages) {
  return pages.keys != nullptr && pages.page_size >= 1 && pages.head_dim >= 2 && pages.head_dim % 2 == 0;
}

}  // namespace

int launch_index_store(const IndexRows& rows, const IndexPages& pages, void* rotated, Stream stream) {
  if (!fits(pages) || rows.keys == nullptr || rows.queries == nullptr ||
      (rows.norm == nullptr && rows.bias != nullptr) ||
      (rows.rotary > 0 && (rows.cos == nullptr || rows.sin == nullptr)) || rows.slot_mapping == nullptr ||
      rotated == nullptr || rows.num_tokens < 1 || rows.num_heads < 1 || rows.stride < pages.head_dim ||
      rows.rotary < 0 || rows.rotary % 2 != 0 || rows.rotary > pages.head_dim) {
    return cudaErrorInvalidValue;
  }
  const int blocks = (rows.num_tokens * (rows.num_heads + 1) + kStoreWarps - 1) / kStoreWarps;
  return launch(index_store_kernel, blocks, kStoreThreads, 0, stream, rows, pages,
                static_cast<uint16_t*>(rotated));
}

int launch_index_pool(const IndexPools& pools, const IndexPages& pages, Stream stream) {
  if (!fits(pages) || pools.pool < 1 || pools.page_tables == nullptr || pools.max_pages < 1 ||
      pools.positions == nullptr || pools.slot_mapping == nullptr || pools.num_tokens < 1 ||
      pools.norm == nullptr || (pools.rotary > 0 && (pools.cos == nullptr || pools.sin == nullptr)) ||
      pools.rotary < 0 || pools.rotary % 2 != 0 || pools.rotary > pages.head_dim) {
    return cudaErrorInvalidValue;
  }
  return launch(index_pool_kernel, (pools.num_tokens + kStoreWarps - 1) / kStoreWarps, kStoreThreads,
                int64_t(4) * kStoreWarps * pages.head_dim, stream, pools, pages);
}

int launch_index_choose(const IndexChoice& choice, const IndexPages& pages, float* scores, Stream stream) {
  if (!fits(pages) || choice.queries == nullptr || choice.page_tables == nullptr ||
      choice.seq_lens == nullptr || choice.positions == nullptr || choice.counts == nullptr ||
      scores == nullptr || choice.num_sequences < 1 || choice.num_heads < 1 || choice.most < 1 ||
      choice.block < 1 || (choice.most + choice.pooled) % choice.block != 0 || choice.local < 0 ||
      (choice.pooled ? choice.local > 0 : choice.weights != nullptr && choice.block != 1) ||
      choice.max_length < 1 || int64_t(choice.max_pages) * pages.page_size < choice.max_length) {
    return cudaErrorInvalidValue;
  }
  const int64_t shared = shared_bytes(choice.num_heads, pages.head_dim);
  const int S = choice.num_sequences, blocks = std::max(1, choice.num_blocks(choice.max_length));
  const int error =
      choice.weights != nullptr || choice.pooled
          ? launch(index_score_kernel, dim3((blocks + kPositions - 1) / kPositions, S), kThreads, shared,
                   stream, choice, pages, scores)
          : launch(index_block_kernel, dim3(blocks, S), kThreads, shared, stream, choice, pages, scores);
  if (error != 0) return error;
  return launch(index_top_kernel, S * choice.num_lists(), kThreads, 0, stream, choice, scores);
}

}  // namespace twofold::cuda
