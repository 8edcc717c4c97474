#include "ops/attention/gqa.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "host/work_clock.h"

namespace twofold {
namespace {

constexpr int kTileRows = 64;  // query rows (tokens x heads of a group) computed together
constexpr int kTasksPerThread = 4;

// Slots of the pool's scratch, beside linear()'s.
constexpr int kQkvSlot = 1, kAttendedSlot = 2, kBlocksSlot = 3;

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
  const size_t kv_heads = static_cast<size_t>(shape_.num_kv_heads), expected = 2 * kv_heads;
  bool fits = planes.size() == expected;
  for (size_t n = 0; fits && n < expected; ++n) {
    fits = planes[n].width == (n < kv_heads ? shape_.head_dim : shape_.value_dim) &&
           planes[n].dtype == planes.front().dtype;
  }
  if (!fits) {
    const int width = planes.empty() ? 0 : planes.back().width;
    const std::string values = shape_.value_dim == shape_.head_dim
                                   ? ""
                                   : " for keys and " + std::to_string(shape_.value_dim) + " for values";
    throw KernelFailure("Gqa.forward: the cache has " + std::to_string(planes.size()) + " planes of " +
                        std::to_string(width) + " elements; expected " + std::to_string(expected) + " of " +
                        std::to_string(shape_.head_dim) + values + ", all of one type");
  }
  if (shape_.rotation >= batch.num_rotations()) {
    throw KernelFailure("Gqa.forward: rotation is " + std::to_string(shape_.rotation) + "; the batch has " +
                        std::to_string(batch.num_rotations()));
  }
  if (2 * batch.num_rotated_pairs(shape_.rotation) > shape_.head_dim) {
    throw KernelFailure("Gqa.forward: rope_cos rotates " +
                        std::to_string(batch.num_rotated_pairs(shape_.rotation)) +
                        " pairs, but head_dim is " + std::to_string(shape_.head_dim));
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
  float* qkv = pool_.scratch_floats(kQkvSlot, T * weights_.qkv->rows());
  linear(table_, pool_, {.x = hidden, .ld = hidden_size(), .norm = weights_.norm, .eps = shape_.eps}, T,
         *weights_.qkv, weights_.qkv_bias, qkv);
  timer.next(Work::kKeysValues);
  store_keys_values(qkv, batch, cache, layer);
  timer.next(Work::kAttention);
  float* attended = pool_.scratch_floats(kAttendedSlot, static_cast<int64_t>(T) * weights_.o->columns());
  attend(qkv, attended, batch, cache, layer);
  if (shape_.gated || shape_.gate_rows > 0) gate(qkv, attended, T);
  timer.next(Work::kOutput);
  linear(table_, pool_, {.x = attended, .ld = weights_.o->columns()}, T, *weights_.o, weights_.o_bias, sum,
         true);
}

// room [2 * rotated pairs]. Leaves the head in the order of halves, for queries and keys alike.
void GqaAttention::rotate(float* head, const AttentionBatch& batch, int token, float* room) const {
  const int half = batch.num_rotated_pairs(shape_.rotation);
  if (shape_.neighbours) {
    std::copy_n(head, 2 * half, room);
    for (int i = 0; i < half; ++i) {
      head[i] = room[2 * i];
      head[half + i] = room[2 * i + 1];
    }
  }
  table_.rope(head, batch.cosine(token, shape_.rotation), batch.sine(token, shape_.rotation), half);
}

void GqaAttention::gate(const float* qkv, float* attended, int T) const {
  const int64_t D = shape_.value_dim, heads = shape_.num_heads, width = weights_.qkv->rows();
  const double us =
      work_us(12.0 * static_cast<double>(T * heads * D), 20.0 * static_cast<double>(T * heads * D));
  for_ranges(pool_, T * heads, 1, us, [&](int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i)
      gate_head(qkv + i / heads * width, static_cast<int>(i % heads), attended + i * D);
  });
}

// row: a token's queries, keys, values and gates.
void GqaAttention::gate_head(const float* row, int head, float* attended) const {
  const int rows = shape_.gate_rows, D = shape_.value_dim;
  const float* gate = row + int64_t{head} * shape_.query_rows() + shape_.head_dim;
  if (rows > 0) gate = row + weights_.qkv->rows() - int64_t{shape_.num_heads - head} * rows;
  if (rows != 1 && !shape_.softplus) return table_.delta->sigmoid_multiply(gate, attended, D);
  for (int i = 0; i < D; ++i) {
    const float x = gate[rows == 1 ? 0 : i];
    attended[i] *= shape_.softplus ? std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)))
                                   : 1.0f / (1.0f + std::exp(-x));
  }
}

void GqaAttention::scale_queries(float* row, int position) const {
  const int64_t D = shape_.head_dim, rows = shape_.query_rows();
  const float factor = shape_.temperature.factor(position);
  if (factor == 1.0f && weights_.q_scale == nullptr) return;
  for (int64_t head = 0; head < shape_.num_heads; ++head) {
    float* q = row + head * rows;
    for (int64_t i = 0; i < D; ++i)
      q[i] *= weights_.q_scale == nullptr ? factor : factor * weights_.q_scale[i];
  }
}

void GqaAttention::store_keys_values(float* qkv, const AttentionBatch& batch, const StateCache& cache,
                                     int layer) {
  const int D = shape_.head_dim, V = shape_.value_dim, heads = shape_.num_heads,
            kv_heads = shape_.shares_kv ? 0 : shape_.num_kv_heads;
  const int64_t width = weights_.qkv->rows();
  const int T = batch.num_tokens();
  const std::vector<StatePlane>& planes = cache.planes(layer);  // of key heads, then of value heads
  for_ranges(
      pool_, T, 1, work_us(4.0 * T * static_cast<double>(width), 10.0 * T * static_cast<double>(width)),
      [&](int64_t first, int64_t count) {
        std::vector<float> room(2 * static_cast<size_t>(batch.num_rotated_pairs(shape_.rotation)));
        std::vector<float> of_keys(shape_.keys_are_values ? static_cast<size_t>(kv_heads * D) : 0);
        for (int t = static_cast<int>(first); t < first + count; ++t) {
          float* row = qkv + t * width;
          if (shape_.flat_norms) {
            table_.rmsnorm(row, weights_.q_norm, shape_.head_eps, row, heads * D);
            table_.rmsnorm(row + heads * D, weights_.k_norm, shape_.head_eps, row + heads * D, kv_heads * D);
          }
          float* keys = row + int64_t{heads} * shape_.query_rows();
          float* values = keys + int64_t{kv_heads} * D;
          if (shape_.keys_are_values) {
            std::copy_n(keys, of_keys.size(), of_keys.data());
            values = of_keys.data();
          }
          for (int head = 0; weights_.v_norm != nullptr && head < kv_heads; ++head)
            table_.rmsnorm(values + head * V, weights_.v_norm, shape_.head_eps, values + head * V, V);
          for (int i = 0; shape_.value_scale != 1.0f && i < kv_heads * V; ++i)
            values[i] *= shape_.value_scale;
          for (int head = 0; head < heads + kv_heads; ++head) {
            const float* norm = head < heads ? weights_.q_norm : weights_.k_norm;
            float* v = head < heads ? row + int64_t{head} * shape_.query_rows() : keys + (head - heads) * D;
            if (norm != nullptr && !shape_.flat_norms) table_.rmsnorm(v, norm, shape_.head_eps, v, D);
            if (shape_.rotated) rotate(v, batch, t, room.data());
          }
          scale_queries(row, batch.position(t));
          const int64_t at = batch.row(t, cache.page_size());
          for (int head = 0; head < kv_heads; ++head) {
            store_row(table_, keys + head * D, planes[static_cast<size_t>(head)], at);
            store_row(table_, values + head * V, planes[static_cast<size_t>(kv_heads + head)], at);
          }
        }
      });
}

// Tiles of tokens with the heads of one key head.
class GqaAttention::Source final : public AttentionSource {
 public:
  Source(const GqaAttention& block, const float* qkv, float* out, const std::vector<StatePlane>& planes)
      : shape_(block.shape_),
        planes_(planes),
        qkv_(qkv),
        out_(out),
        sinks_(block.weights_.sinks),
        q_width_(block.weights_.qkv->rows()),
        out_width_(block.weights_.o->columns()) {}

  int parts() const override { return shape_.num_kv_heads; }
  int heads(int) const override { return group(); }
  const StatePlane& keys(int part) const override { return planes_[static_cast<size_t>(part)]; }
  const StatePlane& values(int part) const override {
    return planes_[static_cast<size_t>(shape_.num_kv_heads + part)];
  }
  const float* sinks(int part) const override {
    return sinks_ == nullptr ? nullptr : sinks_ + part * group();
  }
  const float* queries(const AttentionTile& tile, int part, float* room) const override {
    const int64_t head_rows = shape_.query_rows();
    const float* from = qkv_ + tile.first_token * q_width_ + part * group() * head_rows;
    if (tile.num_tokens == 1 && !shape_.gated) return from;
    for (int i = 0; i < tile.num_tokens * group(); ++i) {
      const float* head = from + i / group() * q_width_ + i % group() * head_rows;
      std::copy_n(head, shape_.head_dim, room + int64_t{i} * shape_.head_dim);
    }
    return room;
  }
  void take(const AttentionTile& tile, int part, const float* sums) const override {
    for (int t = 0; t < tile.num_tokens; ++t)
      std::copy_n(sums + t * size(), size(), out_ + (tile.first_token + t) * out_width_ + part * size());
  }

 private:
  int group() const { return shape_.num_heads / shape_.num_kv_heads; }
  int64_t size() const { return int64_t{group()} * shape_.value_dim; }

  const GqaShape& shape_;
  const std::vector<StatePlane>& planes_;
  const float* qkv_;
  float* out_;
  const float* sinks_;
  int64_t q_width_, out_width_;
};

void GqaAttention::attend(const float* qkv, float* out, AttentionBatch& batch, const StateCache& cache,
                          int layer) const {
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int T = batch.num_tokens(), most = std::max(1, kTileRows / group);
  // Few tokens share one pass over keys and values if each thread gets a key head. Tiles of many tokens differ in work:
  // several per thread.
  const int64_t tasks = int64_t{T <= most ? 1 : kTasksPerThread} * pool_.num_threads();
  int tile_tokens = std::min(T, most);
  const auto num_tiles = [&] { return (T + tile_tokens - 1) / tile_tokens; };
  while (tile_tokens > 1 && int64_t{num_tiles()} * shape_.num_kv_heads < tasks)
    tile_tokens = (tile_tokens + 1) / 2;
  tile_tokens = (T + num_tiles() - 1) / num_tiles();  // as even as possible
  const BlockedAttention attention(table_, pool_, shape_.scale, shape_.window, kBlocksSlot);
  attention.run(Source(*this, qkv, out, cache.planes(layer)), batch, batch.tiles(tile_tokens),
                cache.page_size());
}

}  // namespace twofold
