#include "ops/dense_ffn.h"

#include <string>

#include "host/work_clock.h"
#include "ops/tensor_view.h"

namespace twofold {

void embed(ThreadTeam& team, const SourceMatrix& table, const int32_t* token_ids, float* out, int T) {
  const WorkTimer timer(Work::kEmbedding);
  for (int t = 0; t < T; ++t) {
    if (token_ids[t] < 0 || token_ids[t] >= table.rows) {
      throw KernelFailure("embed: token id " + std::to_string(token_ids[t]) + " at row " + std::to_string(t) +
                          " is outside the vocabulary of " + std::to_string(table.rows));
    }
  }
  const double elements = static_cast<double>(T) * static_cast<double>(table.columns);
  for_ranges(team, T, 1, work_us(4.0 * elements, 30.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      kernels::dequantise_row(table.format, table.row(token_ids[t]), table.row_scales(token_ids[t]),
                              table.columns, out + t * table.columns);
    }
  });
}

DenseFfn::DenseFfn(const kernels::KernelTable& table, ThreadTeam& team, const float* norm,
                   const PackedMatrix& gate, const PackedMatrix& up, const PackedMatrix& down, float eps)
    : ffn_(table, team, static_cast<int>(gate.columns()), static_cast<int>(gate.rows())),
      norm_(norm),
      panels_{gate.segments().front().panels, up.segments().front().panels, down.segments().front().panels},
      formats_{gate.segments().front().format, up.segments().front().format, down.segments().front().format},
      eps_(eps) {}

void DenseFfn::forward(float* hidden, int T) {
  if (T == 0) return;
  const WorkTimer timer(Work::kDenseFfn);
  while (static_cast<int>(rows_.size()) < T) rows_.push_back(static_cast<int>(rows_.size()));
  const int begin[] = {0, T};
  ffn_.run(formats_,
           {.groups = {&panels_, 1},
            .begin = begin,
            .pairs = {rows_.data(), static_cast<size_t>(T)},
            .num_tokens = T,
            .top_k = 1,
            .weights = nullptr},
           {.x = hidden, .ld = ffn_.hidden(), .norm = norm_, .eps = eps_}, hidden);
}

void LmHead::forward(const float* hidden_rows, float* logits, int R) {
  if (R == 0) return;
  const WorkTimer timer(Work::kHead);
  const auto lock = team_.lock_scratch();
  linear(table_, team_, {.x = hidden_rows, .ld = hidden_size(), .norm = norm_, .eps = eps_}, R, weight_,
         nullptr, logits);
}

}  // namespace twofold
