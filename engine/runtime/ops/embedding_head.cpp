#include "ops/embedding_head.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "host/work_clock.h"
#include "ops/tensor_view.h"

namespace twofold {

void embed(ThreadPool& pool, const SourceMatrix& table, const int32_t* token_ids, float* out, int T) {
  const WorkTimer timer(Work::kEmbedding);
  for (int t = 0; t < T; ++t) {
    if (token_ids[t] < 0 || token_ids[t] >= table.rows) {
      throw KernelFailure("embed: token id " + std::to_string(token_ids[t]) + " at row " + std::to_string(t) +
                          " is outside the vocabulary of " + std::to_string(table.rows));
    }
  }
  const double elements = static_cast<double>(T) * static_cast<double>(table.columns);
  for_ranges(pool, T, 1, work_us(4.0 * elements, 30.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      kernels::dequantise_row(table.format, table.row(token_ids[t]), table.row_scales(token_ids[t]),
                              table.columns, out + t * table.columns);
    }
  });
}

void LmHead::norm(const float* hidden_rows, float* out, int R) {
  const WorkTimer timer(Work::kHead);
  if (norm_ == nullptr) {
    if (out != hidden_rows) std::copy_n(hidden_rows, int64_t{R} * hidden_size(), out);
    return;
  }
  norm_rows(table_, pool_, hidden_rows, norm_, eps_, out, R, hidden_size());
}

void LmHead::forward(const float* hidden_rows, float* logits, int R) {
  if (R == 0) return;
  const WorkTimer timer(Work::kHead);
  const auto lock = pool_.lock_scratch();
  linear(table_, pool_, {.x = hidden_rows, .ld = hidden_size(), .norm = norm_, .eps = eps_}, R, weight_,
         nullptr, logits);
  if (softcap_ <= 0) return;
  const int64_t count = R * int64_t{vocabulary()};
  for_ranges(pool_, count, 1024,
             work_us(8.0 * static_cast<double>(count), 400.0 * static_cast<double>(count)),
             [&](int64_t first, int64_t num) {
               for (int64_t i = first; i < first + num; ++i)
                 logits[i] = softcap_ * std::tanh(logits[i] / softcap_);
             });
}

}  // namespace twofold
