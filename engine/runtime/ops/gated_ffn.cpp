#include "ops/gated_ffn.h"

#include "host/work_clock.h"

namespace twofold {

GatedFfn::GatedFfn(const kernels::KernelTable& table, ThreadPool& pool, const PackedMatrix& gate,
                   const PackedMatrix& up, const PackedMatrix& down, kernels::ExpertActivation activation,
                   float limit)
    : table_(table),
      pool_(pool),
      gate_(gate),
      up_(up),
      down_(down),
      gated_(table.gated_as(activation)),
      ffn_(table, pool, static_cast<int>(gate.columns()), static_cast<int>(gate.rows()),
           kernels::Rounding::kOfLevel, activation),
      panels_{gate.segments().front().panels, up.segments().front().panels, down.segments().front().panels},
      formats_{gate.segments().front().format, up.segments().front().format, down.segments().front().format,
               limit} {}

void GatedFfn::forward(const InputRows& input, const float* weights, float* sum, int T) {
  if (T == 0) return;
  const WorkTimer timer(Work::kDenseFfn);
  if (gate_.ranks() != nullptr || up_.ranks() != nullptr || down_.ranks() != nullptr)
    return forward_over_ranks(input, weights, sum, T);
  while (static_cast<int>(rows_.size()) < T) rows_.push_back(static_cast<int>(rows_.size()));
  const int begin[] = {0, T};
  panels_.gate_adapters = gate_.adapters();
  panels_.up_adapters = up_.adapters();
  panels_.down_adapters = down_.adapters();
  std::span<const int32_t> adapters;
  for (const MatrixAdapters* of : {gate_.adapters(), up_.adapters(), down_.adapters()}) {
    if (of != nullptr) adapters = of->rows().of(0, T);
  }
  ffn_.run({&formats_, 1},
           {.groups = {&panels_, 1},
            .begin = begin,
            .pairs = {rows_.data(), static_cast<size_t>(T)},
            .num_tokens = T,
            .top_k = 1,
            .weights = weights,
            .adapters = adapters},
           input, sum);
}

void GatedFfn::forward_over_ranks(const InputRows& input, const float* weights, float* sum, int T) {
  const auto lock = pool_.lock_scratch();
  const int64_t I = gate_.rows();
  inner_.resize(static_cast<size_t>(T * I));
  upped_.resize(inner_.size());
  outputs_.resize(static_cast<size_t>(T) * static_cast<size_t>(hidden_size()));
  if (gate_.ranks() != nullptr && up_.ranks() != nullptr) {
    const Product products[] = {{gate_, nullptr, inner_.data()}, {up_, nullptr, upped_.data()}};
    linear_over_ranks(table_, pool_, input, T, products);
  } else {
    linear(table_, pool_, input, T, gate_, nullptr, inner_.data());
    linear(table_, pool_, input, T, up_, nullptr, upped_.data());
  }
  for (int t = 0; t < T; ++t) {
    float* const row = inner_.data() + t * I;
    gated_(row, upped_.data() + t * I, row, static_cast<int>(I), formats_.limit);
  }
  linear(table_, pool_, {.x = inner_.data(), .ld = I}, T, down_, nullptr, outputs_.data());
  for (int t = 0; t < T; ++t) {
    const int64_t row = int64_t{t} * hidden_size();
    table_.axpy(weights == nullptr ? 1.0f : weights[t], outputs_.data() + row, sum + row, hidden_size());
  }
}

}  // namespace twofold
