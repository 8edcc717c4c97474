// What the threads of the latent attention kernels do between two barriers, compiled for the device and for the CPU
// tests alike.
#pragma once
#include <cmath>
#include <cstdint>

#include "launch_shapes.h"
#include "number_formats.h"
#include "twofold/attention_parts.h"

namespace twofold::cuda {

// A block takes one split of one sequence's positions for up to kMlaHeads query heads, kMlaChunk positions at once.
inline constexpr int kMlaHeads = 16;
inline constexpr int kMlaChunk = 32;
inline constexpr int kMlaThreads = 256;
inline constexpr int kMlaMaxLatent = 2 * kMlaThreads;  // a thread sums two columns

TWOFOLD_HD constexpr int mla_head_blocks(int num_heads) { return (num_heads + kMlaHeads - 1) / kMlaHeads; }
// Words of one cached row in shared memory: an odd number, so that equal columns of neighbouring rows lie in
// different banks.
TWOFOLD_HD constexpr int mla_row_words(int cached) { return (cached / 2) | 1; }
TWOFOLD_HD constexpr int mla_shared_bytes(int cached) {
  return 4 * (kMlaChunk * mla_row_words(cached) + kMlaHeads * cached + kMlaHeads * kMlaChunk + 3 * kMlaHeads);
}

// A block's shared memory.
struct MlaTile {
  uint32_t* rows;  // [kMlaChunk][mla_row_words] pairs of bf16
  float* queries;  // [kMlaHeads][cached], scaled
  float* scores;   // [kMlaHeads][kMlaChunk], weights later
  float* largest;  // [kMlaHeads]
  float* total;    // [kMlaHeads]
  float* fade;     // [kMlaHeads] what earlier chunks' sums are multiplied with
  int cached;
  int latent;
  int num_heads;  // heads of this block

  TWOFOLD_HD MlaTile(uint32_t* memory, int cached_, int latent_, int num_heads_)
      : rows(memory),
        queries(reinterpret_cast<float*>(memory + kMlaChunk * mla_row_words(cached_))),
        scores(queries + kMlaHeads * cached_),
        largest(scores + kMlaHeads * kMlaChunk),
        total(largest + kMlaHeads),
        fade(total + kMlaHeads),
        cached(cached_),
        latent(latent_),
        num_heads(num_heads_) {}
};

TWOFOLD_HD void mla_begin(const MlaTile& tile, int thread, const uint16_t* queries, float scale) {
  for (int i = thread; i < tile.num_heads * tile.cached; i += kMlaThreads)
    tile.queries[i] = float_of_bits(uint32_t(queries[i]) << 16) * scale;
  if (thread < kMlaHeads) {
    tile.largest[thread] = -INFINITY;
    tile.total[thread] = 0;
  }
}

// Row i of the chunk begins at row_of(i), a multiple of 4 bytes.
template <class RowOf>
TWOFOLD_HD void mla_load(const MlaTile& tile, int thread, int count, RowOf row_of) {
  const int words = tile.cached / 2, stride = mla_row_words(tile.cached);
  for (int i = thread; i < count * words; i += kMlaThreads) {
    const int row = i / words, word = i % words;
    tile.rows[row * stride + word] = row_of(row)[word];
  }
}

// A lane scores one position for every eighth head.
TWOFOLD_HD void mla_score(const MlaTile& tile, int thread, int count) {
  const int position = thread % kMlaChunk;
  if (position >= count) return;
  const uint32_t* row = tile.rows + position * mla_row_words(tile.cached);
  for (int head = thread / kMlaChunk; head < tile.num_heads; head += kMlaThreads / kMlaChunk) {
    const float* query = tile.queries + head * tile.cached;
    float even = 0, odd = 0;
    for (int word = 0; word < tile.cached / 2; ++word) {
      even = fused(query[2 * word], bf16_low(row[word]), even);
      odd = fused(query[2 * word + 1], bf16_high(row[word]), odd);
    }
    tile.scores[head * kMlaChunk + position] = even + odd;
  }
}

// Applies a rule that is not linear.
TWOFOLD_HD void mla_bend(const MlaTile& tile, int thread, int count, const kernels::ScoreRule& rule) {
  for (int i = thread; i < tile.num_heads * kMlaChunk; i += kMlaThreads) {
    if (i % kMlaChunk < count) tile.scores[i] = rule.of(tile.scores[i]);
  }
}

TWOFOLD_HD void mla_largest(const MlaTile& tile, int thread, int count) {
  if (thread >= tile.num_heads) return;
  const float before = tile.largest[thread];
  float most = before;
  for (int i = 0; i < count; ++i) most = fmaxf(most, tile.scores[thread * kMlaChunk + i]);
  tile.fade[thread] = expf(before - most);
  tile.largest[thread] = most;
}

TWOFOLD_HD void mla_weigh(const MlaTile& tile, int thread, int count) {
  for (int i = thread; i < tile.num_heads * kMlaChunk; i += kMlaThreads) {
    if (i % kMlaChunk < count) tile.scores[i] = expf(tile.scores[i] - tile.largest[i / kMlaChunk]);
  }
}

// Adds the chunk to a thread's two columns for each head; one thread of each head adds up its weights.
TWOFOLD_HD void mla_sum(const MlaTile& tile, int thread, int count, float (&sums)[kMlaHeads][2]) {
  if (thread < tile.num_heads) {
    float total = tile.total[thread] * tile.fade[thread];
    for (int i = 0; i < count; ++i) total += tile.scores[thread * kMlaChunk + i];
    tile.total[thread] = total;
  }
  if (2 * thread >= tile.latent) return;
#pragma unroll
  for (int head = 0; head < kMlaHeads; ++head) {
    if (head >= tile.num_heads) break;
    sums[head][0] *= tile.fade[head];
    sums[head][1] *= tile.fade[head];
  }
  for (int i = 0; i < count; ++i) {
    const uint32_t pair = tile.rows[i * mla_row_words(tile.cached) + thread];
    const float low = bf16_low(pair), high = bf16_high(pair);
#pragma unroll
    for (int head = 0; head < kMlaHeads; ++head) {
      if (head >= tile.num_heads) break;
      const float weight = tile.scores[head * kMlaChunk + i];
      sums[head][0] = fused(weight, low, sums[head][0]);
      sums[head][1] = fused(weight, high, sums[head][1]);
    }
  }
}

// Results of split s of (sequence, head): largest score, sum of weights, then `latent` weighted sums.
TWOFOLD_HD float* mla_partial(float* workspace, int64_t row, int split, int splits, int latent) {
  return workspace + (row * splits + split) * (latent + 2);
}

TWOFOLD_HD void mla_leave(const MlaTile& tile, int thread, const float (&sums)[kMlaHeads][2],
                          float* workspace, int64_t first_row, int split, int splits) {
#pragma unroll
  for (int head = 0; head < kMlaHeads; ++head) {
    if (head >= tile.num_heads) break;
    float* out = mla_partial(workspace, first_row + head, split, splits, tile.latent);
    if (thread == 0) {
      out[0] = tile.largest[head];
      out[1] = tile.total[head];
    }
    if (2 * thread < tile.latent) {
      out[2 + 2 * thread] = sums[head][0];
      out[3 + 2 * thread] = sums[head][1];
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
