#include "moe/training/expert_training.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "moe/training/gated_gradient.h"
#include "ops/tensor_view.h"

namespace twofold {
namespace {

constexpr int kPanelRows = kernels::kPanelRows;
constexpr int kChunkRows = 64;  // an expert is unpacked once for as many
constexpr int kGate = 0, kUp = 1, kDown = 2;

// The f32 products of the level.
const kernels::RowKernels& products() { return kernels::kernel_table().rows_of(kernels::DType::kF32); }

// One matrix of an expert in its panels.
struct Panels {
  kernels::WeightFormat format;
  const std::byte* data;
  int rows, columns;
  const float* bias;

  int count() const { return static_cast<int>(kernels::num_panels(rows)); }
  int rows_of(int panel) const { return std::min(kPanelRows, rows - panel * kPanelRows); }
  // w [kPanelRows, columns] in float32.
  void unpack(int panel, float* w) const {
    const std::byte* const from = data + panel * kernels::panel_bytes(format, columns);
    kernels::kernel_table().unpack_panel(format, from, columns, w);
  }
};

Panels panels_of(const ExpertStore& store, int layer, int expert, int matrix) {
  const ExpertLayout& layout = store.layout(layer, expert);
  const FfnPanels all = layout.panels(store.expert(layer, expert));
  const int hidden = store.shape().hidden, inner = store.shape().intermediate;
  if (matrix == kGate) return {layout.formats.gate, all.gate, inner, hidden, all.gate_bias};
  if (matrix == kUp) return {layout.formats.up, all.up, inner, hidden, all.up_bias};
  return {layout.formats.down, all.down, hidden, inner, all.down_bias};
}

// Factors of one expert; null where the matrix is not trained.
struct ExpertFactors {
  const float *a, *b;  // [rank, columns], [rows, rank]
  int rank;
  float scale;

  ExpertFactors(const TrainedFactors& all, int expert, int rows, int columns)
      : a(all.a == nullptr ? nullptr : all.a + int64_t{expert} * all.rank * columns),
        b(all.b == nullptr ? nullptr : all.b + int64_t{expert} * rows * all.rank),
        rank(all.a == nullptr ? 0 : all.rank),
        scale(all.scale) {}
};

// y [M, rows] = x w^T + bias + scale * (x A^T) B^T, with x [M, columns]. panel: room for one.
void product(const Panels& w, const ExpertFactors& factors, const float* x, int M, float* panel, float* y) {
  const kernels::KernelTable& table = kernels::kernel_table();
  for (int p = 0; p < w.count(); ++p) {
    w.unpack(p, panel);
    products().matmul(x, w.columns, panel, y + p * kPanelRows, w.rows, M, w.rows_of(p), w.columns);
  }
  for (int m = 0; w.bias != nullptr && m < M; ++m) table.axpy(1.0f, w.bias, y + int64_t{m} * w.rows, w.rows);
  if (factors.rank == 0) return;
  std::vector<float> t(size_t(M) * size_t(factors.rank)), added(size_t(M) * size_t(w.rows));
  products().matmul(x, w.columns, factors.a, t.data(), factors.rank, M, factors.rank, w.columns);
  products().matmul(t.data(), factors.rank, factors.b, added.data(), w.rows, M, w.rows, factors.rank);
  table.axpy(factors.scale, added.data(), y, M * w.rows);
}

// dx [M, columns] += dy w + scale * (dy B) A, with dy [M, rows]. panel: room for one.
void product_back(const Panels& w, const ExpertFactors& factors, const float* dy, int M, float* panel,
                  float* dx) {
  for (int p = 0; p < w.count(); ++p) {
    w.unpack(p, panel);
    products().weighted_sum(dy + p * kPanelRows, w.rows, panel, dx, w.columns, M, w.rows_of(p), w.columns);
  }
  if (factors.rank == 0) return;
  std::vector<float> s(size_t(M) * size_t(factors.rank), 0.0f);
  products().weighted_sum(dy, w.rows, factors.b, s.data(), factors.rank, M, w.rows, factors.rank);
  for (float& value : s) value *= factors.scale;
  products().weighted_sum(s.data(), factors.rank, factors.a, dx, w.columns, M, factors.rank, w.columns);
}

}  // namespace

void ExpertTraining::open(const TrainedLayer& of) {
  if (of.layer < 0 || of.layer >= store_.num_layers())
    throw KernelFailure("no layer " + std::to_string(of.layer));
  if (store_.ranks() != nullptr) throw KernelFailure("experts that ranks share are not trained");
  const ExpertShape& shape = store_.shape();
  panels_.resize(size_t(pool_.num_threads()));
  for (std::vector<float>& panel : panels_)
    panel.resize(size_t(kPanelRows) * size_t(std::max(shape.hidden, shape.intermediate)));
  groups_.assign(of.routing, store_.num_experts());
  row_of_.assign(groups_.pairs.size(), kNowhere);
  if (!of.elsewhere.empty()) leave_out(of.elsewhere);
  for (size_t row = 0; row < groups_.pairs.size(); ++row)
    row_of_[size_t(groups_.pairs[row])] = static_cast<int>(row);
  chunks_.clear();
  for (int g = 0; g < groups_.size(); ++g) {
    const int end = groups_.begin[size_t(g) + 1];
    for (int first = groups_.begin[size_t(g)]; first < end; first += kChunkRows)
      chunks_.push_back({g, first, std::min(kChunkRows, end - first)});
  }
}

void ExpertTraining::leave_out(std::span<const uint8_t> elsewhere) {
  if (elsewhere.size() != size_t(store_.num_experts()))
    throw KernelFailure("`elsewhere` has " + std::to_string(elsewhere.size()) +
                        " entries; one for each expert is expected");
  ExpertGroups here;
  here.begin.push_back(0);
  for (int g = 0; g < groups_.size(); ++g) {
    if (elsewhere[size_t(groups_.experts[size_t(g)])] != 0) continue;
    here.experts.push_back(groups_.experts[size_t(g)]);
    here.pairs.insert(here.pairs.end(), groups_.pairs.begin() + groups_.begin[size_t(g)],
                      groups_.pairs.begin() + groups_.begin[size_t(g) + 1]);
    here.begin.push_back(static_cast<int>(here.pairs.size()));
  }
  groups_ = std::move(here);
}

void ExpertTraining::sum_rows(const LayerRouting& routing, const float* weights, float* to) {
  const kernels::KernelTable& table = kernels::kernel_table();
  const int hidden = store_.shape().hidden;
  pool_.parallel_for(routing.num_tokens, [&](int64_t t, int) {
    float* const sum = to + t * hidden;
    std::fill_n(sum, hidden, 0.0f);
    for (int64_t pair = t * routing.top_k; pair < (t + 1) * routing.top_k; ++pair) {
      const int row = row_of_[size_t(pair)];
      if (row == kNowhere) continue;
      table.axpy(weights == nullptr ? 1.0f : weights[pair], rows_.dx.data() + int64_t{row} * hidden, sum,
                 hidden);
    }
  });
}

// gate and up [count, intermediate], before the activation.
void ExpertTraining::gate_and_up(const TrainedLayer& of, const Chunk& chunk, float* panel, float* gate,
                                 float* up) const {
  const int hidden = store_.shape().hidden, expert = groups_.experts[size_t(chunk.group)];
  std::vector<float> x;
  for (int row = chunk.first; row < chunk.first + chunk.count; ++row) {
    const float* const from = of.x + int64_t{token(of, row)} * hidden;
    x.insert(x.end(), from, from + hidden);
  }
  for (const int matrix : {kGate, kUp}) {
    const Panels w = panels_of(store_, of.layer, expert, matrix);
    const ExpertFactors factors(of.factors[matrix], expert, w.rows, w.columns);
    product(w, factors, x.data(), chunk.count, panel, matrix == kGate ? gate : up);
  }
}

void ExpertTraining::forward(const TrainedLayer& of, float* y, KeptRows* keep) {
  open(of);
  const int hidden = store_.shape().hidden, inner = store_.shape().intermediate;
  const size_t num_rows = groups_.pairs.size();
  rows_.dx.resize(num_rows * size_t(hidden));  // outputs of the experts here
  if (keep != nullptr) {
    keep->gate.resize(num_rows * size_t(inner));
    keep->up.resize(keep->gate.size());
  }
  pool_.parallel_for(std::ssize(chunks_), [&](int64_t c, int thread) {
    const Chunk& chunk = chunks_[size_t(c)];
    float* const panel = panels_[size_t(thread)].data();
    const int expert = groups_.experts[size_t(chunk.group)];
    std::vector<float> gate(size_t(chunk.count) * size_t(inner)), up(gate.size());
    gate_and_up(of, chunk, panel, gate.data(), up.data());
    if (keep != nullptr) {
      std::copy(gate.begin(), gate.end(), keep->gate.begin() + int64_t{chunk.first} * inner);
      std::copy(up.begin(), up.end(), keep->up.begin() + int64_t{chunk.first} * inner);
    }
    const float limit = store_.layout(of.layer, expert).formats.limit;
    const kernels::ExpertActivation activation = store_.shape().activation;
    for (size_t i = 0; i < gate.size(); ++i)
      gate[i] = kernels::gated(activation, limit, gate[i], up[i], [](float v) { return std::exp(v); });
    const Panels w = panels_of(store_, of.layer, expert, kDown);
    const ExpertFactors factors(of.factors[kDown], expert, w.rows, w.columns);
    product(w, factors, gate.data(), chunk.count, panel, rows_.dx.data() + int64_t{chunk.first} * hidden);
  });
  sum_rows(of.routing, of.routing.weights, y);
}

// Gradients of the rows of a chunk: of gate and up before their activation, of the input and of the token's weight.
void ExpertTraining::backward_rows(const TrainedLayer& of, const Chunk& chunk, const float* dy, float* panel,
                                   const Gradients& gradients) {
  const int hidden = store_.shape().hidden, inner = store_.shape().intermediate;
  const int expert = groups_.experts[size_t(chunk.group)], M = chunk.count;
  const float limit = store_.layout(of.layer, expert).formats.limit;
  const kernels::ExpertActivation activation = store_.shape().activation;
  float* const gate = rows_.gate.data() + int64_t{chunk.first} * inner;
  float* const up = rows_.up.data() + int64_t{chunk.first} * inner;
  float* const activated = rows_.inner.data() + int64_t{chunk.first} * inner;
  float* const dx = rows_.dx.data() + int64_t{chunk.first} * hidden;

  std::vector<float> out, dinner(size_t(M) * size_t(inner), 0.0f);
  for (int row = chunk.first; row < chunk.first + M; ++row) {
    const float* const from = dy + int64_t{token(of, row)} * hidden;
    out.insert(out.end(), from, from + hidden);
  }
  const Panels down = panels_of(store_, of.layer, expert, kDown);
  product_back(down, ExpertFactors(of.factors[kDown], expert, hidden, inner), out.data(), M, panel,
               dinner.data());
  for (int m = 0; m < M; ++m) {
    const int pair = groups_.pairs[size_t(chunk.first + m)];
    const float weight = of.routing.weights[pair];
    double of_weight = 0;
    for (int i = 0; down.bias != nullptr && i < hidden; ++i)
      of_weight += double{out[size_t(m * hidden + i)]} * double{down.bias[i]};
    for (int64_t i = int64_t{m} * inner; i < int64_t{m + 1} * inner; ++i) {
      const float value =
          kernels::gated(activation, limit, gate[i], up[i], [](float v) { return std::exp(v); });
      const float d = dinner[size_t(i)];
      of_weight += double{d} * double{value};
      activated[i] = weight * value;
      const GatedGradient slope = gated_gradient(activation, limit, gate[i], up[i]);
      gate[i] = weight * d * slope.gate;
      up[i] = weight * d * slope.up;
    }
    gradients.dweights[pair] = static_cast<float>(of_weight);
  }
  std::fill_n(dx, int64_t{M} * hidden, 0.0f);
  for (const int matrix : {kGate, kUp}) {
    const Panels w = panels_of(store_, of.layer, expert, matrix);
    const ExpertFactors factors(of.factors[matrix], expert, w.rows, w.columns);
    product_back(w, factors, matrix == kGate ? gate : up, M, panel, dx);
  }
}

// Adds the gradients of one matrix's factors, over all rows of an expert: dB = scale * d^T (x A^T), dA = scale * (d B)^T x,
// with d the gradient of the product's rows and x its input.
void ExpertTraining::factor_gradients(const TrainedLayer& of, int group, int matrix, const float* dy,
                                      const Gradients& gradients) const {
  const int hidden = store_.shape().hidden, inner = store_.shape().intermediate;
  const int expert = groups_.experts[size_t(group)];
  const int begin = groups_.begin[size_t(group)], n = groups_.load(group);
  const int rows = matrix == kDown ? hidden : inner, columns = matrix == kDown ? inner : hidden;
  const TrainedFactors& all = of.factors[matrix];
  const ExpertFactors factors(all, expert, rows, columns);
  const int rank = factors.rank;
  std::vector<float> gathered;  // [n, hidden]: inputs of gate and up, gradients of down's outputs
  for (int row = begin; row < begin + n; ++row) {
    const float* const from = (matrix == kDown ? dy : of.x) + int64_t{token(of, row)} * hidden;
    gathered.insert(gathered.end(), from, from + hidden);
  }
  const std::vector<float>& of_rows = matrix == kGate ? rows_.gate : matrix == kUp ? rows_.up : rows_.inner;
  const float* const between = of_rows.data() + int64_t{begin} * inner;  // [n, inner]
  // The weight of a token is in `between`: in the gradients of gate and up, and in down's input.
  const float* const x = matrix == kDown ? between : gathered.data();
  const float* const d = matrix == kDown ? gathered.data() : between;
  std::vector<float> t(size_t(n) * size_t(rank)), s(t.size(), 0.0f), turned(t.size());
  products().matmul(x, columns, factors.a, t.data(), rank, n, rank, columns);
  products().weighted_sum(d, rows, factors.b, s.data(), rank, n, rows, rank);
  const auto turn = [&](const std::vector<float>& from) {  // scale * from^T: [rank, n]
    for (int j = 0; j < n; ++j) {
      for (int r = 0; r < rank; ++r) turned[size_t(r * n + j)] = factors.scale * from[size_t(j * rank + r)];
    }
  };
  turn(s);
  float* const da = gradients.factors[matrix].a + int64_t{expert} * rank * columns;
  products().weighted_sum(turned.data(), n, x, da, columns, rank, n, columns);
  turn(t);
  std::vector<float> db(size_t(rank) * size_t(rows), 0.0f);
  products().weighted_sum(turned.data(), n, d, db.data(), rows, rank, n, rows);
  float* const to = gradients.factors[matrix].b + int64_t{expert} * rows * rank;
  for (int row = 0; row < rows; ++row) {
    for (int r = 0; r < rank; ++r) to[row * rank + r] += db[size_t(r * rows + row)];
  }
}

void ExpertTraining::backward(const TrainedLayer& of, const float* dy, const KeptRows& kept,
                              const Gradients& gradients) {
  open(of);
  const int hidden = store_.shape().hidden, inner = store_.shape().intermediate;
  const size_t num_rows = groups_.pairs.size(), size = num_rows * size_t(inner);
  if (!kept.gate.empty() && kept.gate.size() != size)
    throw KernelFailure("rows of another forward were kept");
  rows_.gate = kept.gate;
  rows_.up = kept.up;
  rows_.gate.resize(size);
  rows_.up.resize(size);
  rows_.inner.resize(size);
  rows_.dx.resize(num_rows * size_t(hidden));
  std::fill_n(gradients.dweights, row_of_.size(), 0.0f);
  pool_.parallel_for(std::ssize(chunks_), [&](int64_t c, int thread) {
    const Chunk& chunk = chunks_[size_t(c)];
    float* const panel = panels_[size_t(thread)].data();
    if (kept.gate.empty()) {
      const int64_t at = int64_t{chunk.first} * inner;
      gate_and_up(of, chunk, panel, rows_.gate.data() + at, rows_.up.data() + at);
    }
    backward_rows(of, chunk, dy, panel, gradients);
  });
  pool_.parallel_for(int64_t{groups_.size()} * 3, [&](int64_t c, int) {
    const int matrix = static_cast<int>(c % 3);
    if (gradients.factors[matrix].a != nullptr)
      factor_gradients(of, static_cast<int>(c / 3), matrix, dy, gradients);
  });
  sum_rows(of.routing, nullptr, gradients.dx);
}

}  // namespace twofold
