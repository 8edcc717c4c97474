// What the threads of the latent attention kernels do between two barriers, compiled for the device and for the CPU
// tests alike.
#pragma once
#include <cmath>
#include <cstdint>

#include "launch_shapes.h"
#include "number_formats.h"
#include "twofold/attention_parts.h"

namespace twofold::cuda {

// A block takes one split of one sequence's positions for several query heads, a chunk of positions at once.
inline constexpr int kMlaThreads = 256;
inline constexpr int kMlaUsualLatent = 512;
inline constexpr int kMlaMaxLatent = 1024;

// A block's shared memory for latents of up to kLatent: kMlaUsualLatent or kMlaMaxLatent. A tile twice as wide has half the
// heads and half the positions at once, so that a block needs no more shared memory and a thread no more registers.
template <int kLatent>
struct MlaTile {
  static constexpr int kPairs = kLatent / (2 * kMlaThreads);  // pairs of columns that a thread sums
  static constexpr int kHeads = 16 / kPairs;
  static constexpr int kChunk = 32 / kPairs;
  // Where a chunk has fewer positions than a warp has lanes, the lanes read several queries: an odd number of floats from
  // query to query puts equal columns into different banks.
  static constexpr int kQueryPadding = kChunk < kWarpSize ? 1 : 0;
  using Sums = float[kHeads][2 * kPairs];

  uint32_t* rows;  // [kChunk][row_words] pairs of bf16
  float* queries;  // [kHeads][cached + kQueryPadding], scaled
  float* scores;   // [kHeads][kChunk], weights later
  float* largest;  // [kHeads]
  float* total;    // [kHeads]
  float* fade;     // [kHeads] what earlier chunks' sums are multiplied with
  int cached;
  int latent;
  int num_heads;  // heads of this block

  TWOFOLD_HD MlaTile(uint32_t* memory, int cached_, int latent_, int num_heads_)
      : rows(memory),
        queries(reinterpret_cast<float*>(memory + kChunk * row_words(cached_))),
        scores(queries + kHeads * (cached_ + kQueryPadding)),
        largest(scores + kHeads * kChunk),
        total(largest + kHeads),
        fade(total + kHeads),
        cached(cached_),
        latent(latent_),
        num_heads(num_heads_) {}

  static TWOFOLD_HD constexpr int head_blocks(int num_heads) { return (num_heads + kHeads - 1) / kHeads; }
  // Words of one cached row in shared memory: an odd number, so that equal columns of neighbouring rows lie in
  // different banks.
  static TWOFOLD_HD constexpr int row_words(int cached) { return (cached / 2) | 1; }
  static TWOFOLD_HD constexpr int shared_bytes(int cached) {
    return 4 *
           (kChunk * row_words(cached) + kHeads * (cached + kQueryPadding) + kHeads * kChunk + 3 * kHeads);
  }
};

template <int kLatent>
TWOFOLD_HD void mla_begin(const MlaTile<kLatent>& tile, int thread, const uint16_t* queries, float scale) {
  using Tile = MlaTile<kLatent>;
  for (int i = thread; i < tile.num_heads * tile.cached; i += kMlaThreads)
    tile.queries[i + i / tile.cached * Tile::kQueryPadding] =
        float_of_bits(uint32_t(queries[i]) << 16) * scale;
  if (thread < Tile::kHeads) {
    tile.largest[thread] = -INFINITY;
    tile.total[thread] = 0;
  }
}

// Row i of the chunk begins at row_of(i), a multiple of 4 bytes.
template <int kLatent, class RowOf>
TWOFOLD_HD void mla_load(const MlaTile<kLatent>& tile, int thread, int count, RowOf row_of) {
  const int words = tile.cached / 2, stride = tile.row_words(tile.cached);
  for (int i = thread; i < count * words; i += kMlaThreads) {
    const int row = i / words, word = i % words;
    tile.rows[row * stride + word] = row_of(row)[word];
  }
}

// A thread scores one position for some of the heads.
template <int kLatent>
TWOFOLD_HD void mla_score(const MlaTile<kLatent>& tile, int thread, int count) {
  constexpr int kChunk = MlaTile<kLatent>::kChunk;
  const int position = thread % kChunk;
  if (position >= count) return;
  const uint32_t* row = tile.rows + position * tile.row_words(tile.cached);
  for (int head = thread / kChunk; head < tile.num_heads; head += kMlaThreads / kChunk) {
    const float* query = tile.queries + head * (tile.cached + tile.kQueryPadding);
    float even = 0, odd = 0;
    for (int word = 0; word < tile.cached / 2; ++word) {
      even = fused(query[2 * word], bf16_low(row[word]), even);
      odd = fused(query[2 * word + 1], bf16_high(row[word]), odd);
    }
    tile.scores[head * kChunk + position] = even + odd;
  }
}

// Applies a rule that is not linear.
template <int kLatent>
TWOFOLD_HD void mla_bend(const MlaTile<kLatent>& tile, int thread, int count,
                         const kernels::ScoreRule& rule) {
  for (int i = thread; i < tile.num_heads * tile.kChunk; i += kMlaThreads) {
    if (i % tile.kChunk < count) tile.scores[i] = rule.of(tile.scores[i]);
  }
}

template <int kLatent>
TWOFOLD_HD void mla_largest(const MlaTile<kLatent>& tile, int thread, int count) {
  if (thread >= tile.num_heads) return;
  const float before = tile.largest[thread];
  float most = before;
  for (int i = 0; i < count; ++i) most = fmaxf(most, tile.scores[thread * tile.kChunk + i]);
  tile.fade[thread] = expf(before - most);
  tile.largest[thread] = most;
}

template <int kLatent>
TWOFOLD_HD void mla_weigh(const MlaTile<kLatent>& tile, int thread, int count) {
  for (int i = thread; i < tile.num_heads * tile.kChunk; i += kMlaThreads) {
    if (i % tile.kChunk < count) tile.scores[i] = expf(tile.scores[i] - tile.largest[i / tile.kChunk]);
  }
}

// Adds the chunk to a thread's columns for each head; one thread of each head adds up its weights.
template <int kLatent>
TWOFOLD_HD void mla_sum(const MlaTile<kLatent>& tile, int thread, int count,
                        typename MlaTile<kLatent>::Sums& sums) {
  using Tile = MlaTile<kLatent>;
  if (thread < tile.num_heads) {
    float total = tile.total[thread] * tile.fade[thread];
    for (int i = 0; i < count; ++i) total += tile.scores[thread * Tile::kChunk + i];
    tile.total[thread] = total;
  }
  if (2 * thread >= tile.latent) return;
#pragma unroll
  for (int head = 0; head < Tile::kHeads; ++head) {
    if (head >= tile.num_heads) break;
#pragma unroll
    for (float& sum : sums[head]) sum *= tile.fade[head];
  }
  for (int i = 0; i < count; ++i) {
    float low[Tile::kPairs], high[Tile::kPairs];
#pragma unroll
    for (int p = 0; p < Tile::kPairs; ++p) {
      const int word = thread + p * kMlaThreads;
      const bool inside = p == 0 || 2 * word < tile.latent;
      const uint32_t pair = inside ? tile.rows[i * tile.row_words(tile.cached) + word] : 0;
      low[p] = bf16_low(pair), high[p] = bf16_high(pair);
    }
#pragma unroll
    for (int head = 0; head < Tile::kHeads; ++head) {
      if (head >= tile.num_heads) break;
      const float weight = tile.scores[head * Tile::kChunk + i];
#pragma unroll
      for (int p = 0; p < Tile::kPairs; ++p) {
        sums[head][2 * p] = fused(weight, low[p], sums[head][2 * p]);
        sums[head][2 * p + 1] = fused(weight, high[p], sums[head][2 * p + 1]);
      }
    }
  }
}

// Results of split s of (sequence, head): largest score, sum of weights, then `latent` weighted sums.
TWOFOLD_HD float* mla_partial(float* workspace, int64_t row, int split, int splits, int latent) {
  return workspace + (row * splits + split) * (latent + 2);
}

template <int kLatent>
TWOFOLD_HD void mla_leave(const MlaTile<kLatent>& tile, int thread,
                          const typename MlaTile<kLatent>::Sums& sums, float* workspace, int64_t first_row,
                          int split, int splits) {
  using Tile = MlaTile<kLatent>;
#pragma unroll
  for (int head = 0; head < Tile::kHeads; ++head) {
    if (head >= tile.num_heads) break;
    float* out = mla_partial(workspace, first_row + head, split, splits, tile.latent);
    if (thread == 0) {
      out[0] = tile.largest[head];
      out[1] = tile.total[head];
    }
#pragma unroll
    for (int p = 0; p < Tile::kPairs; ++p) {
      const int column = 2 * (thread + p * kMlaThreads);
      if (column >= tile.latent) break;
      out[2 + column] = sums[head][2 * p];
      out[3 + column] = sums[head][2 * p + 1];
    }
  }
}

// Column `column` of one head's mean latent, from its splits in order; `first` as in split_range. sink: a logit that takes
// weight and gives nothing, -INFINITY: none.
TWOFOLD_HD float mla_join(float* workspace, int64_t row, int length, int first, int splits, int latent,
                          int column, float sink) {
  float most = sink;
  for (int s = first / kSplitTokens; s < num_splits(length); ++s)
    most = fmaxf(most, mla_partial(workspace, row, s, splits, latent)[0]);
  if (most == -INFINITY) return 0.0f;
  float total = expf(sink - most), value = 0;
  for (int s = first / kSplitTokens; s < num_splits(length); ++s) {
    const float* part = mla_partial(workspace, row, s, splits, latent);
    const float weight = expf(part[0] - most);
    total = fused(part[1], weight, total);
    value = fused(part[2 + column], weight, value);
  }
  return total > 0 ? value / total : 0.0f;
}

// ---- storing: a warp per token for its cached row, and per token and head for the query's rotated part

TWOFOLD_HD float bf16_at(const uint16_t* row, int i) { return float_of_bits(uint32_t(row[i]) << 16); }

// A lane's share of the sum of squares.
TWOFOLD_HD float mla_squares(const uint16_t* row, int latent, int lane) {
  float sum = 0;
  for (int i = lane; i < latent; i += kWarpSize) sum = fused(bf16_at(row, i), bf16_at(row, i), sum);
  return sum;
}

TWOFOLD_HD void mla_normalise(const uint16_t* row, const float* norm, float inverse, int latent, int lane,
                              uint16_t* out) {
  for (int i = lane; i < latent; i += kWarpSize) out[i] = bf16_of_float(bf16_at(row, i) * inverse * norm[i]);
}

// out: the first halves of the pairs, then the second; cos null: the elements as they are.
TWOFOLD_HD void mla_rotate(const uint16_t* from, const float* cos, const float* sin, int rope,
                           bool neighbours, int lane, uint16_t* out) {
  if (cos == nullptr) {
    for (int i = lane; i < rope; i += kWarpSize) out[i] = from[i];
    return;
  }
  const int half = rope / 2;
  for (int i = lane; i < half; i += kWarpSize) {
    const float a = bf16_at(from, neighbours ? 2 * i : i),
                b = bf16_at(from, neighbours ? 2 * i + 1 : half + i);
    out[i] = bf16_of_float(a * cos[i] - b * sin[i]);
    out[half + i] = bf16_of_float(b * cos[i] + a * sin[i]);
  }
}

}  // namespace twofold::cuda
