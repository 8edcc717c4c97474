#include "ops/gqa_attention.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "host/work_clock.h"

namespace twofold {
namespace {

constexpr int kTileRows = 32;  // query rows (tokens x heads of a group) computed together
constexpr int64_t kScoreFloats = int64_t{1}
                                 << 18;  // of one tile: 1 MiB, about a core's share of the near caches

// Of the pool's scratch, beside linear()'s.
constexpr int kQkvSlot = 1, kAttendedSlot = 2, kTileSlot = 3;

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace

GqaAttention::GqaAttention(const kernels::KernelTable& table, ThreadPool& pool, const GqaWeights& weights,
                           const GqaShape& shape)
    : table_(table), pool_(pool), weights_(weights), shape_(shape) {}

void GqaAttention::check(const AttentionBatch& batch, const StateCache& cache, int layer) const {
  if (layer < 0 || layer >= cache.num_layers()) {
    throw KernelFailure("Gqa.forward: layer is " + std::to_string(layer) + "; the cache has layers 0 to " +
                        std::to_string(cache.num_layers() - 1));
  }
  const std::vector<StatePlane>& planes = cache.planes(layer);
  const size_t expected = 2 * static_cast<size_t>(shape_.num_kv_heads);
  const bool fits = planes.size() == expected && std::ranges::all_of(planes, [&](const StatePlane& plane) {
                      return plane.width == shape_.head_dim && plane.dtype == planes.front().dtype;
                    });
  if (!fits) {
    const int width = planes.empty() ? 0 : planes.back().width;
    throw KernelFailure("Gqa.forward: the cache has " + std::to_string(planes.size()) + " planes of " +
                        std::to_string(width) + " elements; expected " + std::to_string(expected) + " of " +
                        std::to_string(shape_.head_dim) + ", all of one type");
  }
  if (2 * batch.num_rotated_pairs() > shape_.head_dim) {
    throw KernelFailure("Gqa.forward: rope_cos rotates " + std::to_string(batch.num_rotated_pairs()) +
                        " pairs, but head_dim is " + std::to_string(shape_.head_dim));
  }
}

void GqaAttention::forward(float* hidden, AttentionBatch& batch, StateCache& cache, int layer) {
  check(batch, cache, layer);
  batch.check_pages(cache);
  const int T = batch.num_tokens();
  if (T == 0) return;
  const auto lock = pool_.lock_scratch();
  WorkTimer timer(Work::kQkv);
  float* qkv = pool_.scratch_floats(kQkvSlot, T * weights_.qkv->rows());
  linear(table_, pool_, {.x = hidden, .ld = hidden_size(), .norm = weights_.norm, .eps = shape_.eps}, T,
         *weights_.qkv, weights_.qkv_bias, qkv);
  timer.next(Work::kKeysValues);
  store_keys_values(qkv, batch, cache, layer);
  timer.next(Work::kAttention);
  float* attended = pool_.scratch_floats(kAttendedSlot, static_cast<int64_t>(T) * weights_.o->columns());
  attend(qkv, attended, batch, cache, layer);
  timer.next(Work::kOutput);
  linear(table_, pool_, {.x = attended, .ld = weights_.o->columns()}, T, *weights_.o, weights_.o_bias, hidden,
         true);
}

void GqaAttention::store_keys_values(float* qkv, const AttentionBatch& batch, const StateCache& cache,
                                     int layer) {
  const int D = shape_.head_dim, heads = shape_.num_heads, kv_heads = shape_.num_kv_heads;
  const int64_t width = weights_.qkv->rows();
  const int half = batch.num_rotated_pairs();
  const int T = batch.num_tokens();
  const std::vector<StatePlane>& planes = cache.planes(layer);  // of key heads, then of value heads
  const auto put = [&](const float* row, char* to) {
    if (planes.front().dtype == kernels::DType::kBF16) {
      table_.f32_to_bf16(row, reinterpret_cast<uint16_t*>(to), D);
    } else {
      std::memcpy(to, row, static_cast<size_t>(D) * sizeof(float));
    }
  };
  for_ranges(pool_, T, 1,
             work_us(4.0 * T * static_cast<double>(width), 10.0 * T * static_cast<double>(width)),
             [&](int64_t first, int64_t count) {
               for (int t = static_cast<int>(first); t < first + count; ++t) {
                 float* row = qkv + t * width;
                 for (int head = 0; head < heads + kv_heads; ++head) {
                   const float* norm = head < heads ? weights_.q_norm : weights_.k_norm;
                   float* v = row + head * D;
                   if (norm != nullptr) table_.rmsnorm(v, norm, shape_.eps, v, D);
                   table_.rope(v, batch.cosine(t), batch.sine(t), half);
                 }
                 const int page = batch.pages(t)[batch.position(t) / cache.page_size()];
                 const int64_t at = batch.position(t) % cache.page_size() * planes.front().row_bytes;
                 for (int head = 0; head < 2 * kv_heads; ++head)
                   put(row + (heads + head) * D, planes[static_cast<size_t>(head)].page(page) + at);
               }
             });
}

int64_t GqaAttention::tile_memory(int rows, int context) const {
  return rows * (padded(context) + 2 * padded(shape_.head_dim) + 1);
}

void GqaAttention::attend(const float* qkv, float* out, AttentionBatch& batch, const StateCache& cache,
                          int layer) {
  const int group = shape_.num_heads / shape_.num_kv_heads;
  int context = 0;  // most positions any tile looks at
  double positions = 0;
  for (int t = 0; t < batch.num_tokens(); ++t) {
    int seen = batch.position(t) + 1;
    if (shape_.sliding_window > 0) seen = std::min(seen, shape_.sliding_window);
    context = std::max(context, seen);
    positions += seen;
  }
  int tile_tokens = std::max(1, kTileRows / group);
  if (shape_.sliding_window > 0) context += tile_tokens;
  while (tile_tokens > 1 && tile_tokens * group * static_cast<int64_t>(context) > kScoreFloats)
    tile_tokens /= 2;
  const std::vector<AttentionTile>& tiles = batch.tiles(tile_tokens);

  const int64_t memory = padded(tile_memory(tile_tokens * group, context));
  float* scratch = pool_.scratch_floats(kTileSlot, memory * pool_.num_threads());
  const int64_t tasks = static_cast<int64_t>(tiles.size()) * shape_.num_kv_heads;
  const auto run = [&](int64_t task, int thread) {
    // Tiles of high positions cost most: those first, so that the last chunks are small.
    const AttentionTile& tile = tiles[tiles.size() - 1 - static_cast<size_t>(task / shape_.num_kv_heads)];
    attend_tile(qkv, out, tile, static_cast<int>(task % shape_.num_kv_heads), batch, cache, layer,
                scratch + thread * memory);
  };
  const double work = positions * shape_.head_dim * shape_.num_kv_heads;
  if (work_us(2.0 * work * static_cast<double>(kernels::element_bytes(cache.planes(layer).front().dtype)) /
                  tile_tokens,
              4.0 * work * group) < kForkUs) {
    for (int64_t task = 0; task < tasks; ++task) run(task, 0);
  } else {
    pool_.parallel_for(tasks, run);
  }
}

void GqaAttention::attend_tile(const float* qkv, float* out, const AttentionTile& tile, int kv_head,
                               const AttentionBatch& batch, const StateCache& cache, int layer,
                               float* memory) const {
  const int D = shape_.head_dim, group = shape_.num_heads / shape_.num_kv_heads,
            page_size = cache.page_size();
  const int rows = tile.num_tokens * group;
  const int64_t q_width = weights_.qkv->rows(), out_width = weights_.o->columns();
  const int last =
      batch.position(tile.first_token + tile.num_tokens - 1) + 1;  // one past the positions looked at
  const auto first_of = [&](int token) {
    return shape_.sliding_window > 0 ? std::max(0, batch.position(token) + 1 - shape_.sliding_window) : 0;
  };
  const int first = first_of(tile.first_token);
  const int64_t ld = padded(last - first);
  float* queries = memory;
  float* sums = queries + rows * D;
  float* scores = sums + rows * D;

  for (int t = 0; t < tile.num_tokens; ++t) {
    std::memcpy(queries + static_cast<int64_t>(t) * group * D,
                qkv + (tile.first_token + t) * q_width + kv_head * group * D,
                static_cast<size_t>(group * D) * sizeof(float));
  }
  const int32_t* pages = batch.pages(tile.first_token);
  const StatePlane& key_rows = cache.planes(layer)[static_cast<size_t>(kv_head)];
  const StatePlane& value_rows = cache.planes(layer)[static_cast<size_t>(shape_.num_kv_heads + kv_head)];
  const bool bf16 = key_rows.dtype == kernels::DType::kBF16;
  for_page_runs(key_rows, pages, page_size, first, last, [&](int at, int count, const char* keys) {
    if (bf16) {
      table_.matmul_bf16(queries, D, reinterpret_cast<const uint16_t*>(keys), scores + at, ld, rows, count,
                         D);
    } else {
      table_.matmul_f32(queries, D, reinterpret_cast<const float*>(keys), scores + at, ld, rows, count, D);
    }
  });
  // Each token's own stretch of positions; what others of the tile see beyond it weighs nothing here.
  float* totals = scores + rows * ld;
  for (int t = 0; t < tile.num_tokens; ++t) {
    const int token = tile.first_token + t;
    const int begin = first_of(token) - first, end = batch.position(token) + 1 - first;
    for (int g = 0; g < group; ++g) {
      float* row = scores + (t * group + g) * ld;
      totals[t * group + g] = table_.softmax_exp(row + begin, end - begin, shape_.scale);
      std::fill(row, row + begin, 0.0f);
      std::fill(row + end, row + (last - first), 0.0f);
    }
  }
  std::fill(sums, sums + rows * D, 0.0f);
  for_page_runs(value_rows, pages, page_size, first, last, [&](int at, int count, const char* values) {
    if (bf16) {
      table_.weighted_sum_bf16(scores + at, ld, reinterpret_cast<const uint16_t*>(values), sums, D, rows,
                               count, D);
    } else {
      table_.weighted_sum_f32(scores + at, ld, reinterpret_cast<const float*>(values), sums, D, rows, count,
                              D);
    }
  });
  for (int row = 0; row < rows; ++row) {
    float* to = out + (tile.first_token + row / group) * out_width + (kv_head * group + row % group) * D;
    const float share = 1.0f / totals[row];
    for (int d = 0; d < D; ++d) to[d] = sums[static_cast<int64_t>(row) * D + d] * share;
  }
}

}  // namespace twofold
