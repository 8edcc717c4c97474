#include "ops/recurrent/gated_delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "host/work_clock.h"

namespace twofold {
namespace {

constexpr int kTokens = 16;  // that one task convolves
constexpr float kNormEps = 1e-6f;
constexpr int kColumns = kernels::kDeltaColumns;

// Slots of the pool's scratch, beside linear()'s.
constexpr int kProjectedScratch = 1, kConvolvedScratch = 2, kAttendedScratch = 3;

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

int GatedDeltaShape::blocks() const { return static_cast<int>(rounded(value_dim, kColumns)) / kColumns; }
int64_t GatedDeltaShape::tail_floats() const { return rounded(int64_t{taps - 1} * channels(), 16); }
int64_t GatedDeltaShape::record_bytes() const {
  const int64_t block = int64_t{key_dim} * kColumns;
  return 4 * rounded(tail_floats() + int64_t{num_v_heads} * blocks() * block, 16);
}

// Intermediate values of a step's tokens: by head, so that a head's tokens are adjacent (by token, their rows
// were 8 KiB apart for Qwen3-Next, and the recurrence waited for them).
struct GatedDeltaNet::Buffers {
  const AttentionBatch& batch;
  const StateCache& cache;
  RecordPlace place;
  int64_t T;
  float* projected;          // [T, inputs]
  float *q, *k;              // [k heads, T, key_dim]
  float *v, *out;            // [v heads, blocks, T, kDeltaColumns]
  float *decay, *beta, *kq;  // [v heads, T]
  float* attended;           // [T, v heads, value_dim]

  float* row(int token, int inputs) const { return projected + int64_t{token} * inputs; }
  float* record(int number) const { return place.record(cache, number); }
};

GatedDeltaNet::GatedDeltaNet(const kernels::KernelTable& table, ThreadPool& pool,
                             const GatedDeltaParts& parts, const GatedDeltaShape& shape)
    : table_(table),
      pool_(pool),
      parts_(parts),
      shape_(shape),
      // rmsnorm divides by the mean of squares; by their sum it would be the L2 norm. Queries are divided by
      // sqrt(key_dim), too.
      query_scale_(static_cast<size_t>(shape.key_dim), 1.0f / static_cast<float>(shape.key_dim)),
      key_scale_(static_cast<size_t>(shape.key_dim), 1.0f / std::sqrt(static_cast<float>(shape.key_dim))),
      zeros_(static_cast<size_t>(std::max(shape.key_dim, shape.value_dim))) {}

int GatedDeltaNet::key_head(int h) const {
  return shape_.tiled ? h % shape_.num_k_heads : h / shape_.of_key_head();
}
int GatedDeltaNet::within(int h) const {
  return shape_.tiled ? h / shape_.num_k_heads : h % shape_.of_key_head();
}
int GatedDeltaNet::value_head(int g, int n) const {
  return shape_.tiled ? n * shape_.num_k_heads + g : g * shape_.of_key_head() + n;
}
int GatedDeltaNet::query_at(int g) const { return g * (shape_.grouped ? group_rows() : shape_.key_dim); }
int GatedDeltaNet::key_at(int g) const {
  return query_at(g) + (shape_.grouped ? shape_.key_dim : shape_.keys());
}
int GatedDeltaNet::value_at(int h) const {
  if (!shape_.grouped) return 2 * shape_.keys() + h * shape_.value_dim;
  return query_at(key_head(h)) + 2 * shape_.key_dim + within(h) * shape_.value_dim;
}
int GatedDeltaNet::z_at(int h) const {
  return value_at(h) + (shape_.grouped ? shape_.of_key_head() * shape_.value_dim : shape_.values());
}
int GatedDeltaNet::b_at(int h) const {
  const int first = shape_.channels() + shape_.values();
  return first + (shape_.grouped_gates ? 2 * key_head(h) * shape_.of_key_head() + within(h) : h);
}
int GatedDeltaNet::a_at(int h) const {
  return b_at(h) + (shape_.grouped_gates ? shape_.of_key_head() : shape_.num_v_heads);
}

void GatedDeltaNet::forward(const float* hidden, float* sum, AttentionBatch& batch, const StateCache& cache,
                            int layer) {
  const RecordPlace place{layer, shape_.record_at};
  place.check("GatedDelta.forward", batch, cache, shape_.record_bytes());
  const int T = batch.num_tokens();
  if (T == 0) return;
  const auto lock = pool_.lock_scratch();
  WorkTimer timer(Work::kQkv);
  const int v_heads = shape_.num_v_heads;
  const int64_t values = int64_t{v_heads} * shape_.blocks() * kColumns;
  float* room =
      pool_.scratch_floats(kConvolvedScratch, T * (2 * int64_t{shape_.keys()} + 2 * values + 3 * v_heads));
  const auto take = [&](int64_t floats) {
    room += T * floats;
    return room - T * floats;
  };
  Buffers at{.batch = batch,
             .cache = cache,
             .place = place,
             .T = T,
             .projected = pool_.scratch_floats(kProjectedScratch, int64_t{T} * shape_.inputs()),
             .q = take(shape_.keys()),
             .k = take(shape_.keys()),
             .v = take(values),
             .out = take(values),
             .decay = take(v_heads),
             .beta = take(v_heads),
             .kq = take(v_heads),
             .attended = pool_.scratch_floats(kAttendedScratch, int64_t{T} * shape_.values())};
  parts_.project.run(table_, pool_, hidden, hidden_size(), T, at.projected);

  timer.next(Work::kAttention);
  struct Piece {
    const AttentionTile* run;
    float* record;
    int first, count;
  };
  std::vector<Piece> runs, pieces;
  for (const AttentionTile& run : batch.runs()) {
    float* record = at.record(batch.record(run.first_token));
    runs.push_back({&run, record, 0, run.num_tokens});
    for (int first = 0; first < run.num_tokens; first += kTokens)
      pieces.push_back({&run, record, first, std::min(kTokens, run.num_tokens - first)});
  }
  const int k_heads = shape_.num_k_heads, blocks = shape_.blocks();
  const int64_t convolutions = static_cast<int64_t>(pieces.size()) * k_heads;
  const int64_t recurrences = static_cast<int64_t>(runs.size()) * v_heads * blocks;
  const int64_t endings = static_cast<int64_t>(pieces.size() + runs.size());
  Countdown convolved, recurred;
  convolved.start(static_cast<int>(convolutions));
  recurred.start(static_cast<int>(recurrences));
  const LoopPhase phases[] = {{convolutions}, {recurrences}, {endings}};
  const double state = static_cast<double>(recurrences) * shape_.key_dim * kColumns;
  const double us = work_us(8.0 * state, 8.0 * state / static_cast<double>(runs.size()) * T) +
                    work_us(16.0 * T * shape_.channels(), 40.0 * T * shape_.channels());
  for_phases(pool_, phases, us, [&](int phase, int64_t chunk, int) {
    if (phase == 0) {
      const Piece& piece = pieces[static_cast<size_t>(chunk / k_heads)];
      convolve(at, *piece.run, piece.record, piece.first, piece.count, static_cast<int>(chunk % k_heads));
      convolved.done();
      return;
    }
    if (phase == 1) {
      convolved.wait(pool_);
      const Piece& of = runs[static_cast<size_t>(chunk / (v_heads * blocks))];
      const int block = static_cast<int>(chunk % (v_heads * blocks));
      recur(at, *of.run, of.record + shape_.tail_floats(), block / blocks, block % blocks);
      recurred.done();
      return;
    }
    recurred.wait(pool_);
    if (chunk < static_cast<int64_t>(runs.size())) {
      const Piece& of = runs[static_cast<size_t>(chunk)];
      return keep_tails(at, *of.run, of.record);
    }
    const Piece& piece = pieces[static_cast<size_t>(chunk) - runs.size()];
    std::vector<float> normed(static_cast<size_t>(shape_.value_dim));
    for (int t = 0; t < piece.count; ++t)
      gate_output(at, piece.run->first_token + piece.first + t, normed.data());
  });

  timer.next(Work::kOutput);
  parts_.out.add(table_, pool_, at.attended, T, sum);
}

void GatedDeltaNet::convolve(const Buffers& at, const AttentionTile& run, const float* tail, int first,
                             int count, int g) const {
  const int K = shape_.key_dim, V = shape_.value_dim, taps = shape_.taps, channels = shape_.channels();
  std::vector<const float*> rows(static_cast<size_t>(taps));
  for (int t = run.first_token + first; t < run.first_token + first + count; ++t) {
    const int position = at.batch.position(t), begin = at.batch.position(run.first_token);
    // Convolution of n channels, which begin at `from` in a row of projections and at `channel` among the convolution's.
    const auto convolved = [&](int from, int channel, int n, float* y) {
      for (int j = 0; j < taps; ++j) {
        const int back = taps - 1 - j;
        const float*& row = rows[static_cast<size_t>(j)];
        if (position < back) {
          row = zeros_.data();
        } else if (position - back >= begin) {
          row = at.row(t - back, shape_.inputs()) + from;
        } else {
          row = tail + int64_t{(position - back) % (taps - 1)} * channels + channel;
        }
      }
      table_.delta->short_convolution(rows.data(), taps, parts_.conv + channel, channels, y, n);
    };
    float* q = at.q + (g * at.T + t) * K;
    float* k = at.k + (g * at.T + t) * K;
    convolved(query_at(g), g * K, K, q);
    convolved(key_at(g), shape_.keys() + g * K, K, k);
    const float eps = kNormEps / static_cast<float>(K);
    table_.rmsnorm(q, query_scale_.data(), eps, q, K);
    table_.rmsnorm(k, key_scale_.data(), eps, k, K);
    float kq;
    table_.rows_of(kernels::DType::kF32).matmul(q, K, k, &kq, 1, 1, 1, K);
    const float* projected = at.row(t, shape_.inputs());
    for (int n = 0; n < shape_.of_key_head(); ++n) {
      const int h = value_head(g, n);
      for (int first_column = 0; first_column < V; first_column += kColumns) {
        const int columns = std::min(kColumns, V - first_column);
        float* v = at.v + ((h * shape_.blocks() + first_column / kColumns) * at.T + t) * kColumns;
        const int column = h * V + first_column;
        convolved(value_at(h) + first_column, 2 * shape_.keys() + column, columns, v);
        std::fill(v + columns, v + kColumns, 0.0f);
      }
      const int64_t gates = h * at.T + t;
      at.decay[gates] = std::exp(parts_.decay_rate[h] * softplus(projected[a_at(h)] + parts_.decay_bias[h]));
      at.beta[gates] = sigmoid(projected[b_at(h)]);
      at.kq[gates] = kq;
    }
  }
}

void GatedDeltaNet::recur(const Buffers& at, const AttentionTile& run, float* states, int h,
                          int block) const {
  const int64_t size = int64_t{shape_.key_dim} * kColumns;
  float* state = states + (int64_t{h} * shape_.blocks() + block) * size;
  if (at.batch.position(run.first_token) == 0) std::fill_n(state, size, 0.0f);
  const int64_t t = run.first_token, gates = h * at.T + t;
  const int64_t key = (key_head(h) * at.T + t) * shape_.key_dim;
  const int64_t value = ((int64_t{h} * shape_.blocks() + block) * at.T + t) * kColumns;
  const kernels::DeltaTokens tokens{.q = at.q + key,
                                    .k = at.k + key,
                                    .key_stride = shape_.key_dim,
                                    .v = at.v + value,
                                    .out = at.out + value,
                                    .value_stride = kColumns,
                                    .decay = at.decay + gates,
                                    .beta = at.beta + gates,
                                    .kq = at.kq + gates,
                                    .gate_stride = 1};
  if (!at.batch.keeps_records())
    return table_.delta->delta_rule(tokens, run.num_tokens, state, shape_.key_dim);
  for (int i = 0; i < run.num_tokens; ++i) {
    kernels::DeltaTokens one = tokens;
    one.q += int64_t{i} * shape_.key_dim, one.k += int64_t{i} * shape_.key_dim;
    one.v += int64_t{i} * kColumns, one.out += int64_t{i} * kColumns;
    one.decay += i, one.beta += i, one.kq += i;
    table_.delta->delta_rule(one, 1, state, shape_.key_dim);
    const int kept = at.batch.kept_record(run.first_token + i);
    if (kept >= 0) std::copy_n(state, size, at.record(kept) + shape_.tail_floats() + (state - states));
  }
}

void GatedDeltaNet::gate_output(const Buffers& at, int t, float* normed) const {
  const int V = shape_.value_dim;
  for (int h = 0; h < shape_.num_v_heads; ++h) {
    for (int first = 0; first < V; first += kColumns) {
      const float* out = at.out + ((h * shape_.blocks() + first / kColumns) * at.T + t) * kColumns;
      std::copy_n(out, std::min(kColumns, V - first), normed + first);
    }
    parts_.head_norm.in_place(table_, normed, V);
    parts_.gate.apply(table_, at.row(t, shape_.inputs()) + z_at(h), normed,
                      at.attended + int64_t{t} * shape_.values() + h * V, V);
  }
}

void GatedDeltaNet::keep_tails(const Buffers& at, const AttentionTile& run, float* tail) const {
  for (int t = run.first_token; t < run.first_token + run.num_tokens; ++t) {
    const int kept = at.batch.kept_record(t);
    if (kept < 0) continue;
    std::copy_n(tail, shape_.tail_floats(), at.record(kept));
    write_tail(at, run.first_token, t + 1, at.record(kept));
  }
  write_tail(at, run.first_token, run.first_token + run.num_tokens, tail);
}

void GatedDeltaNet::write_tail(const Buffers& at, int first, int end, float* tail) const {
  const int kept = shape_.taps - 1;
  for (int t = std::max(first, end - kept); t < end; ++t) {
    const float* from = at.row(t, shape_.inputs());
    float* to = tail + int64_t{at.batch.position(t) % kept} * shape_.channels();
    for (int g = 0; g < shape_.num_k_heads; ++g) {
      std::copy_n(from + query_at(g), shape_.key_dim, to + g * shape_.key_dim);
      std::copy_n(from + key_at(g), shape_.key_dim, to + shape_.keys() + g * shape_.key_dim);
    }
    for (int h = 0; h < shape_.num_v_heads; ++h)
      std::copy_n(from + value_at(h), shape_.value_dim, to + 2 * shape_.keys() + h * shape_.value_dim);
  }
}

}  // namespace twofold
