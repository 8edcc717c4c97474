#include "ops/attention/gqa.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "host/work_clock.h"

namespace twofold {
namespace {

constexpr int kTileRows = 64;  // query rows (tokens x heads of a group) computed together
constexpr int kTasksPerThread = 4;

// Slots of the pool's scratch, beside linear()'s.
constexpr int kQkvScratch = 1, kAttendedScratch = 2, kBlocksScratch = 3;

}  // namespace

GqaAttention::GqaAttention(const kernels::KernelTable& table, ThreadPool& pool, GqaParts parts)
    : table_(table), pool_(pool), parts_(std::move(parts)) {}

void GqaAttention::check(const AttentionBatch& batch, const StateCache& cache, int layer) const {
  if (layer < 0 || layer >= cache.num_layers()) {
    throw KernelFailure("Gqa.forward: layer is " + std::to_string(layer) + "; the cache has layers 0 to " +
                        std::to_string(cache.num_layers() - 1));
  }
  const QkvRows& rows = parts_.rows;
  const std::vector<StatePlane>& planes = cache.planes(layer);
  const size_t kv_heads = static_cast<size_t>(rows.num_kv_heads);
  const size_t expected = 2 * kv_heads + static_cast<size_t>(parts_.select.num_planes());
  bool fits = planes.size() == expected;
  for (size_t n = 0; fits && n < 2 * kv_heads; ++n) {
    fits = planes[n].width == (n < kv_heads ? rows.head_dim : rows.value_dim) &&
           planes[n].dtype == planes.front().dtype;
  }
  if (!fits) {
    const int width = planes.empty() ? 0 : planes.back().width;
    const std::string values = rows.value_dim == rows.head_dim
                                   ? ""
                                   : " for keys and " + std::to_string(rows.value_dim) + " for values";
    throw KernelFailure("Gqa.forward: the cache has " + std::to_string(planes.size()) + " planes of " +
                        std::to_string(width) + " elements; expected " + std::to_string(expected) + " of " +
                        std::to_string(rows.head_dim) + values + ", all of one type");
  }
  const Rotation& rotation = parts_.rotation;
  if (rotation.index >= batch.num_rotations()) {
    throw KernelFailure("Gqa.forward: rotation is " + std::to_string(rotation.index) + "; the batch has " +
                        std::to_string(batch.num_rotations()));
  }
  if (rotation.positions && 2 * rotation.pairs(batch) > rows.head_dim) {
    throw KernelFailure("Gqa.forward: rope_cos rotates " + std::to_string(rotation.pairs(batch)) +
                        " pairs, but head_dim is " + std::to_string(rows.head_dim));
  }
}

void GqaAttention::forward(const float* hidden, float* sum, AttentionBatch& batch, StateCache& cache,
                           int layer) {
  check(batch, cache, layer);
  batch.check_pages(cache);
  const int T = batch.num_tokens();
  if (T == 0) return;
  const auto lock = pool_.lock_scratch();
  WorkTimer timer(Work::kQkv);
  float* qkv = pool_.scratch_floats(kQkvScratch, T * parts_.project.rows());
  parts_.project.run(table_, pool_, hidden, hidden_size(), T, qkv);
  timer.next(Work::kKeysValues);
  make_heads(qkv, batch, cache, layer);
  timer.next(Work::kAttention);
  parts_.select.prepare({hidden, qkv, parts_.project.rows()}, batch, cache, layer);
  float* attended = pool_.scratch_floats(kAttendedScratch, static_cast<int64_t>(T) * parts_.out.columns());
  attend(qkv, attended, batch, cache, layer);
  if (parts_.gate) gate(qkv, attended, T);
  timer.next(Work::kOutput);
  parts_.out.add(table_, pool_, attended, T, sum);
}

// Norms, rotates and scales all heads, and stores keys and values.
void GqaAttention::make_heads(float* qkv, const AttentionBatch& batch, const StateCache& cache,
                              int layer) const {
  const int64_t width = parts_.project.rows();
  const int T = batch.num_tokens();
  const double elements = T * static_cast<double>(width);
  for_ranges(pool_, T, 1, work_us(4.0 * elements, 10.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> room(2 * static_cast<size_t>(parts_.rotation.pairs(batch)));
    for (int t = static_cast<int>(first); t < first + count; ++t) {
      float* row = qkv + t * width;
      make_queries(row, batch, t, room.data());
      if (!parts_.rows.shares_kv) store_keys_values(row, batch, cache, layer, t, room.data());
    }
  });
}

void GqaAttention::make_queries(float* row, const AttentionBatch& batch, int token, float* room) const {
  const QkvRows& rows = parts_.rows;
  const HeadNorms& norms = parts_.norms;
  if (norms.flat) norms.q.in_place(table_, row, static_cast<int>(rows.query_rows()));
  for (int head = 0; head < rows.num_heads; ++head) {
    float* q = row + rows.query(head);
    if (!norms.flat) norms.q.in_place(table_, q, rows.head_dim);
    parts_.rotation.in_place(table_, batch, token, q, room);
    parts_.scale.apply(parts_.scale.factor(batch.position(token), head), q, rows.head_dim);
  }
}

void GqaAttention::store_keys_values(float* row, const AttentionBatch& batch, const StateCache& cache,
                                     int layer, int token, float* room) const {
  const QkvRows& rows = parts_.rows;
  const HeadNorms& norms = parts_.norms;
  const int D = rows.head_dim, V = rows.value_dim, kv_heads = rows.num_kv_heads;
  float *keys = row + rows.key(0), *values = row + rows.value(0);
  if (norms.flat) norms.k.in_place(table_, keys, static_cast<int>(rows.key_rows()));
  std::vector<float> of_keys;
  if (rows.keys_are_values) {
    of_keys.assign(keys, keys + rows.key_rows());
    values = of_keys.data();
  }
  const std::vector<StatePlane>& planes = cache.planes(layer);  // of key heads, then of value heads
  const int64_t at = batch.row(token, cache.page_size());
  for (int head = 0; head < kv_heads; ++head) {
    float *k = keys + head * D, *v = values + head * V;
    if (!norms.flat) norms.k.in_place(table_, k, D);
    parts_.rotation.in_place(table_, batch, token, k, room);
    norms.v.in_place(table_, v, V);
    for (int i = 0; rows.value_scale != 1.0f && i < V; ++i) v[i] *= rows.value_scale;
    store_row(table_, k, planes[static_cast<size_t>(head)], at);
    store_row(table_, v, planes[static_cast<size_t>(kv_heads + head)], at);
  }
}

// Tiles of tokens with the heads of one key head.
class GqaAttention::Source final : public AttentionSource {
 public:
  Source(const GqaParts& parts, const float* qkv, float* out, const std::vector<StatePlane>& planes)
      : rows_(parts.rows),
        planes_(planes),
        qkv_(qkv),
        out_(out),
        q_width_(parts.project.rows()),
        out_width_(parts.out.columns()) {}

  int parts() const override { return rows_.num_kv_heads; }
  int heads(int) const override { return rows_.group(); }
  int first_head(int part) const override { return part * rows_.group(); }
  const StatePlane& keys(int part) const override { return planes_[static_cast<size_t>(part)]; }
  const StatePlane& values(int part) const override {
    return planes_[static_cast<size_t>(rows_.num_kv_heads + part)];
  }
  const float* queries(const AttentionTile& tile, int part, float* room) const override {
    const float* from = qkv_ + tile.first_token * q_width_ + rows_.query(first_head(part));
    if (tile.num_tokens == 1 && !rows_.interleaved_gate) return from;
    const int group = rows_.group();
    for (int i = 0; i < tile.num_tokens * group; ++i) {
      const float* head = from + i / group * q_width_ + rows_.query(i % group);
      std::copy_n(head, rows_.head_dim, room + int64_t{i} * rows_.head_dim);
    }
    return room;
  }
  void take(const AttentionTile& tile, int part, const float* sums) const override {
    const int64_t size = int64_t{rows_.group()} * rows_.value_dim;
    for (int t = 0; t < tile.num_tokens; ++t)
      std::copy_n(sums + t * size, size, out_ + (tile.first_token + t) * out_width_ + part * size);
  }

 private:
  const QkvRows& rows_;
  const std::vector<StatePlane>& planes_;
  const float* qkv_;
  float* out_;
  int64_t q_width_, out_width_;
};

void GqaAttention::attend(const float* qkv, float* out, AttentionBatch& batch, const StateCache& cache,
                          int layer) const {
  const int kv_heads = parts_.rows.num_kv_heads;
  const int T = batch.num_tokens(), most = std::max(1, kTileRows / parts_.rows.group());
  // Few tokens share one pass over keys and values if each thread gets a key head. Tiles of many tokens differ in work:
  // several per thread.
  const int64_t tasks = int64_t{T <= most ? 1 : kTasksPerThread} * pool_.num_threads();
  int tile_tokens = std::min(T, most);
  const auto num_tiles = [&] { return (T + tile_tokens - 1) / tile_tokens; };
  while (tile_tokens > 1 && int64_t{num_tiles()} * kv_heads < tasks) tile_tokens = (tile_tokens + 1) / 2;
  tile_tokens = (T + num_tiles() - 1) / num_tiles();  // as even as possible
  const BlockedAttention attention(table_, pool_, parts_.scores, parts_.select, kBlocksScratch);
  attention.run(Source(parts_, qkv, out, cache.planes(layer)), batch, batch.tiles(tile_tokens),
                cache.page_size());
}

void GqaAttention::gate(const float* qkv, float* attended, int T) const {
  const int64_t D = parts_.rows.value_dim, heads = parts_.rows.num_heads, width = parts_.project.rows();
  const double elements = static_cast<double>(T * heads * D);
  for_ranges(
      pool_, T * heads, 1, work_us(12.0 * elements, 20.0 * elements), [&](int64_t first, int64_t count) {
        for (int64_t i = first; i < first + count; ++i) {
          const float* of_head = qkv + i / heads * width + parts_.rows.gate(static_cast<int>(i % heads));
          parts_.gate.apply(table_, of_head, attended + i * D, attended + i * D, static_cast<int>(D));
        }
      });
}

}  // namespace twofold
