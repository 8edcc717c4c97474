#include "ops/attention/indexer.h"

#include <algorithm>
#include <limits>
#include <string>

#include "ops/attention/blocked_attention.h"
#include "ops/linear.h"

namespace twofold {
namespace {

constexpr int kTileRows = 128;  // query rows (tokens x heads) scored together
constexpr int kWidenRows = 16;  // query rows from which narrow keys are widened once for all of them
constexpr int kPositions = 64;  // scored at a time
constexpr int kStretch = 512;   // positions of a task, at least
constexpr int64_t kScoreFloats = int64_t{1} << 24;  // scores kept at a time: 64 MiB

// A position's key in float32.
void read_row(const kernels::KernelTable& table, const StatePlane& plane, const int32_t* pages, int position,
              int page_size, float* to) {
  const char* const row = plane.page(pages[position / page_size]) + position % page_size * plane.row_bytes;
  if (plane.dtype == kernels::DType::kF32) {
    std::copy_n(reinterpret_cast<const float*>(row), plane.width, to);
    return;
  }
  table.rows_of(plane.dtype).widen(row, to, plane.width);
  if (plane.scales == nullptr) return;
  const float scale = *plane.scales_of(row);
  for (int i = 0; i < plane.width; ++i) to[i] *= scale;
}

}  // namespace

struct Indexer::Rows {
  float* keys;     // [tokens, rows of `keys`]
  float* queries;  // [tokens, heads * head_dim]; null: no token has more positions than are chosen
};

struct Indexer::Scores {
  int first, end;           // tokens
  std::vector<int64_t> at;  // [tokens] place of a token's scores [lists, entries]; -1: it needs none
  float* values;

  float* of(int token) const {
    const int64_t place = at[static_cast<size_t>(token - first)];
    return place < 0 ? nullptr : values + place;
  }
};

template <typename Body>
void Indexer::for_all(size_t count, double us, Body body) const {
  if (us >= kForkUs && count > 1) return pool_.parallel_for(static_cast<int64_t>(count), body);
  for (size_t i = 0; i < count; ++i) body(static_cast<int64_t>(i), 0);
}

const StatePlane& Indexer::plane(const AttentionBatch& batch, const StateCache& cache, int layer) const {
  const std::vector<StatePlane>& planes = cache.planes(layer);
  const StatePlane& plane = planes[planes.size() - static_cast<size_t>(num_planes())];
  if (plane.width != parts_.head_dim || planes.back().width != parts_.head_dim) {
    throw KernelFailure("Indexer: the cache has keys of " + std::to_string(plane.width) +
                        " elements; expected " + std::to_string(parts_.head_dim));
  }
  for (const Rotation& rotation : {parts_.rotation, parts_.pool_rotation}) {
    const bool fits = !rotation.positions || (rotation.index < batch.num_rotations() &&
                                              2 * rotation.pairs(batch) <= parts_.head_dim);
    if (!fits) {
      throw KernelFailure("Indexer: rotation " + std::to_string(rotation.index) + " of the batch's " +
                          std::to_string(batch.num_rotations()) + " does not fit head_dim " +
                          std::to_string(parts_.head_dim));
    }
  }
  return plane;
}

void Indexer::choose(const ChooserInput& input, const AttentionBatch& batch, const StateCache& cache,
                     int layer, ChosenPositions& chosen) {
  const StatePlane& plane = this->plane(batch, cache, layer);
  const int T = batch.num_tokens(), page_size = cache.page_size();
  int64_t longest = 0;
  for (int t = 0; t < T; ++t) longest = std::max<int64_t>(longest, batch.position(t) + 1);
  const int64_t key_floats = T * parts_.keys.rows();
  Rows rows{pool_.scratch_floats(kChooserScratch, key_floats + T * parts_.queries.rows()), nullptr};
  parts_.keys.run(table_, pool_, input.hidden, parts_.keys.columns(), T, rows.keys);
  if (longest > chosen.most()) {
    rows.queries = rows.keys + key_floats;
    project_queries(input, T, rows.queries);
  }
  make_rows(rows, batch, plane, page_size);
  if (parts_.pool > 0) make_pools(batch, plane, page_size);

  const int64_t room =
      int64_t{kPositions} * std::max(kTileRows, parts_.num_heads) + int64_t{kPositions} * parts_.head_dim;
  for (Scores scores{0, 0, {}, nullptr}; scores.first < T; scores.first = scores.end) {
    int64_t floats = 0, pairs = 0;
    scores.at.clear();
    for (scores.end = scores.first; scores.end < T; ++scores.end) {
      const int position = batch.position(scores.end);
      const bool scored = position >= chosen.most();
      const int64_t own = scored ? (int64_t{num_lists()} * num_entries(position) + 15) / 16 * 16 : 0;
      if (floats > 0 && floats + own > kScoreFloats) break;
      scores.at.push_back(scored ? floats : -1);
      floats += own;
      pairs += scored ? position + 1 : 0;
    }
    scores.values = pool_.scratch_floats(kChooserScratch + 1, std::max<int64_t>(floats, 1));
    float* const rooms = pool_.scratch_floats(kChooserScratch + 2, room * pool_.num_threads());
    const std::vector<Task> all = tasks(batch, scores);
    const double flops = 2.0 * static_cast<double>(pairs) * parts_.num_heads * parts_.head_dim;
    for_all(all.size(), work_us(0, flops), [&](int64_t task, int thread) {
      const auto add = parts_.pool > 0 ? &Indexer::add_pool_scores : &Indexer::add_scores;
      (this->*add)(all[static_cast<size_t>(task)], rows, batch, plane, page_size, scores,
                   rooms + thread * room);
    });
    for_all(scores.at.size(), work_us(16.0 * static_cast<double>(floats), 0), [&](int64_t t, int) {
      const int token = scores.first + static_cast<int>(t);
      keep(batch, token, scores.of(token), chosen);
    });
  }
}

void Indexer::project_queries(const ChooserInput& input, int num_tokens, float* queries) const {
  const Projection& of = parts_.queries;
  if (!parts_.of_input) return of.run(table_, pool_, input.projected, input.width, num_tokens, queries);
  const int64_t H = parts_.keys.columns();
  if (parts_.input_norm.weight == nullptr) return of.run(table_, pool_, input.hidden, H, num_tokens, queries);
  float* const normed = pool_.scratch_floats(kChooserScratch + 1, num_tokens * H);
  norm_rows(table_, pool_, input.hidden, of.norm, of.eps, normed, num_tokens, static_cast<int>(H));
  for (int64_t t = 0; t < num_tokens; ++t)
    parts_.input_norm.in_place(table_, normed + t * H, static_cast<int>(H));
  Projection plain = of;
  plain.norm = nullptr;
  plain.run(table_, pool_, normed, H, num_tokens, queries);
}

// Norms, rotates and scales keys and queries, and stores the keys.
void Indexer::make_rows(const Rows& rows, const AttentionBatch& batch, const StatePlane& plane,
                        int page_size) const {
  const int T = batch.num_tokens(), D = parts_.head_dim;
  const int heads = rows.queries == nullptr ? 0 : parts_.num_heads;
  const bool last = parts_.rotates_last && parts_.rotation.positions;
  const int begin = last ? D - 2 * parts_.rotation.pairs(batch) : 0;
  const double elements = static_cast<double>(T) * D * (heads + 1);
  for_ranges(pool_, T, 1, work_us(8.0 * elements, 10.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> turned(static_cast<size_t>(D));
    for (int t = static_cast<int>(first); t < first + count; ++t) {
      float* key = rows.keys + t * parts_.keys.rows();
      if (parts_.pool == 0 || parts_.pool_bias != nullptr) {
        parts_.key_norm.in_place(table_, key, D);
        parts_.rotation.in_place(table_, batch, t, key + begin, turned.data());
      }
      store_row(table_, key, plane, batch.row(t, page_size));
      if (num_planes() > 1) store_row(table_, key + D, *(&plane + 1), batch.row(t, page_size));
      for (int h = 0; h < heads; ++h) {
        float* query = rows.queries + (int64_t{t} * heads + h) * D;
        parts_.query_norm.in_place(table_, query, D);
        parts_.rotation.in_place(table_, batch, t, query + begin, turned.data());
        parts_.scale.apply(parts_.scale.factor(batch.position(t), h), query, D);
      }
    }
  });
}

void Indexer::add_gated(const StatePlane& plane, const int32_t* pages, int end, int page_size,
                        std::vector<float>& sum) const {
  const size_t D = sum.size();
  const int first = end - parts_.pool;
  std::vector<float> logits(static_cast<size_t>(parts_.pool) * D), key(D), total(D);
  std::vector<float> most(D, -std::numeric_limits<float>::infinity());
  for (int j = 0; j < parts_.pool; ++j) {
    float* const of = logits.data() + static_cast<size_t>(j) * D;
    read_row(table_, *(&plane + 1), pages, first + j, page_size, of);
    table_.axpy(1.0f, parts_.pool_bias + static_cast<size_t>(j) * D, of, static_cast<int>(D));
    for (size_t i = 0; i < D; ++i) most[i] = std::max(most[i], of[i]);
  }
  for (int j = 0; j < parts_.pool; ++j) {
    read_row(table_, plane, pages, first + j, page_size, key.data());
    for (size_t i = 0; i < D; ++i) {
      const float weight = std::exp(logits[static_cast<size_t>(j) * D + i] - most[i]);
      total[i] += weight;
      sum[i] += weight * key[i];
    }
  }
  for (size_t i = 0; i < D; ++i) sum[i] /= total[i];
}

void Indexer::make_pools(const AttentionBatch& batch, const StatePlane& plane, int page_size) const {
  const int T = batch.num_tokens(), D = parts_.head_dim, P = parts_.pool;
  const double elements = static_cast<double>(T) * D;
  for_ranges(pool_, T, 1, work_us(8.0 * elements, 10.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> mean(static_cast<size_t>(D)), row(mean.size());
    for (int t = static_cast<int>(first); t < first + count; ++t) {
      const int end = batch.position(t) + 1;
      if (end % P != 0) continue;
      std::fill(mean.begin(), mean.end(), 0.0f);
      if (parts_.pool_bias != nullptr) {
        add_gated(plane, batch.pages(t), end, page_size, mean);
        store_row(table_, mean.data(), plane, batch.row(t, page_size));
        continue;
      }
      for (int position = end - P; position < end; ++position) {
        read_row(table_, plane, batch.pages(t), position, page_size, row.data());
        table_.axpy(1.0f, row.data(), mean.data(), D);
      }
      for (float& each : mean) each /= static_cast<float>(P);
      parts_.key_norm.in_place(table_, mean.data(), D);
      parts_.pool_rotation.in_place(table_, batch, t, mean.data(), row.data());
      store_row(table_, mean.data(), plane, batch.row(t, page_size));
    }
  });
}

const float* Indexer::weights_of(const Rows& rows, int token) const {
  const int64_t before = int64_t{num_planes()} * parts_.head_dim;
  if (parts_.keys.rows() == before) return ones_.data();
  return rows.keys + token * parts_.keys.rows() + before;
}

std::vector<Indexer::Task> Indexer::tasks(const AttentionBatch& batch, const Scores& scores) const {
  const int most = std::max(1, kTileRows / parts_.num_heads);
  const int stretch = (kStretch + unit() - 1) / unit() * unit();
  std::vector<Task> tasks;
  for (int begin = scores.first, end; begin < scores.end; begin = end) {
    end = begin + 1;
    if (scores.of(begin) == nullptr) continue;
    while (end < scores.end && end - begin < most && scores.of(end) != nullptr &&
           batch.pages(end) == batch.pages(begin) && batch.position(end) == batch.position(end - 1) + 1)
      ++end;
    const int length = batch.position(end - 1) + 1;
    for (int first = 0; first < length; first += stretch)
      tasks.push_back({{begin, end - begin}, first, std::min(first + stretch, length)});
  }
  return tasks;
}

void Indexer::add_scores(const Task& task, const Rows& rows, const AttentionBatch& batch,
                         const StatePlane& plane, int page_size, const Scores& scores, float* room) const {
  const int D = parts_.head_dim, H = parts_.num_heads, block = parts_.block;
  const int first = task.tile.first_token, M = task.tile.num_tokens * H;
  const float* const queries = rows.queries + int64_t{first} * H * D;
  float *const products = room, *const wide = room + int64_t{kPositions} * std::max(kTileRows, H);
  const bool widens = M >= kWidenRows && plane.dtype != kernels::DType::kF32;
  const kernels::RowKernels& kernel = table_.rows_of(widens ? kernels::DType::kF32 : plane.dtype);
  // Of `count` positions from `position` on, whose keys are `keys`.
  const auto score = [&](int position, int count, const char* keys) {
    if (widens) table_.rows_of(plane.dtype).widen(keys, wide, int64_t{count} * D);
    kernel.matmul(queries, D, widens ? static_cast<const void*>(wide) : keys, products, kPositions, M, count,
                  D);
    for (int t = 0; t < task.tile.num_tokens; ++t) {
      const int token = first + t, entries = num_entries(batch.position(token));
      const int seen = std::min(count, batch.position(token) + 1 - position);
      float* const of_token = products + int64_t{t} * H * kPositions;
      for (int list = 0; list < num_lists() && seen > 0; ++list) {
        float* values = block > 0 ? of_token + list * kPositions : scores.of(token) + position;
        if (block == 0) table_.relu_sum(of_token, kPositions, weights_of(rows, token), values, H, seen);
        if (plane.scales != nullptr) table_.multiply(plane.scales_of(keys), values, seen);
        float* const best = scores.of(token) + int64_t{list} * entries;
        for (int i = 0; block > 0 && i < seen; ++i) {
          float& peak = best[(position + i) / block];
          peak = (position + i) % block == 0 ? values[i] : std::max(peak, values[i]);
        }
      }
    }
  };
  for_page_runs(plane, batch.pages(first), page_size, task.first, task.end,
                [&](int at, int count, const char* keys) {
                  for (int j = 0; j < count; j += kPositions)
                    score(task.first + at + j, std::min(kPositions, count - j), keys + j * plane.row_bytes);
                });
}

void Indexer::add_pool_scores(const Task& task, const Rows& rows, const AttentionBatch& batch,
                              const StatePlane& plane, int page_size, const Scores& scores,
                              float* room) const {
  const int D = parts_.head_dim, H = parts_.num_heads, P = parts_.pool;
  const int first = task.tile.first_token, M = task.tile.num_tokens * H, end = task.end / P;
  float *const products = room, *const keys = room + int64_t{kPositions} * std::max(kTileRows, H);
  for (int begin = task.first / P; begin < end; begin += kPositions) {
    const int count = std::min(kPositions, end - begin);
    for (int i = 0; i < count; ++i)
      read_row(table_, plane, batch.pages(first), (begin + i + 1) * P - 1, page_size, keys + int64_t{i} * D);
    table_.rows_of(kernels::DType::kF32)
        .matmul(rows.queries + int64_t{first} * H * D, D, keys, products, kPositions, M, count, D);
    for (int t = 0; t < task.tile.num_tokens; ++t) {
      const int seen = std::min(count, num_entries(batch.position(first + t)) - begin);
      if (seen <= 0) continue;
      table_.relu_sum(products + int64_t{t} * H * kPositions, kPositions, weights_of(rows, first + t),
                      scores.of(first + t) + begin, H, seen);
    }
  }
}

// scores: null where all positions are kept.
void Indexer::keep(const AttentionBatch& batch, int token, float* scores, ChosenPositions& chosen) const {
  const int position = batch.position(token), entries = num_entries(position);
  if (parts_.block == 0 && parts_.pool == 0) return chosen.keep_top(token, scores, entries);
  const int most = chosen.most() / unit();
  std::vector<int32_t> units(static_cast<size_t>(std::min(entries, most))), positions;
  const auto append = [&](int begin, int end) {
    for (int p = begin; p < std::min(end, position + 1); ++p) positions.push_back(p);
  };
  for (int list = 0; list < num_lists(); ++list) {
    float* const of_list = scores == nullptr ? nullptr : scores + int64_t{list} * entries;
    for (int i = 0; of_list != nullptr && i < std::min(parts_.local, entries); ++i)
      of_list[entries - 1 - i] = std::numeric_limits<float>::infinity();
    top_entries(of_list, entries, most, units.data());
    positions.clear();
    for (const int32_t each : units) append(each * unit(), (each + 1) * unit());
    if (parts_.pool > 0) append(entries * parts_.pool, position + 1);
    chosen.assign(token, positions, list);
  }
}

}  // namespace twofold
