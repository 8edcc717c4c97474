#include "dense_ffn.h"

#include <cstring>
#include <string>

namespace twofold {

void embed(const kernels::KernelTable& kernels, const Weight& table, const int32_t* token_ids, float* out,
           int T) {
  for (int t = 0; t < T; ++t) {
    if (token_ids[t] < 0 || token_ids[t] >= table.rows) {
      throw KernelFailure("embed: token id " + std::to_string(token_ids[t]) + " at row " + std::to_string(t) +
                          " is outside the vocabulary of " + std::to_string(table.rows));
    }
  }
  for (int64_t t = 0; t < T; ++t) {
    const void* row = table.row(token_ids[t]);
    if (table.dtype == kernels::DType::kBF16) {
      kernels.bf16_to_f32(static_cast<const uint16_t*>(row), out + t * table.cols, table.cols);
    } else {
      std::memcpy(out + t * table.cols, row, static_cast<size_t>(table.cols) * sizeof(float));
    }
  }
}

void DenseFfn::forward(float* hidden, int T) {
  if (T == 0) return;
  const auto lock = team_.lock_scratch();
  const int64_t H = hidden_size(), I = gate_.rows;
  float* normed = team_.scratch(0, T * H);
  float* gated = team_.scratch(1, T * I);
  float* down = team_.scratch(2, T * H);
  norm_rows(table_, team_, hidden, norm_, eps_, normed, T, static_cast<int>(H));
  const double elements = 2.0 * static_cast<double>(I) * static_cast<double>(H);
  const double us =
      work_us(elements * static_cast<double>(kernels::element_bytes(gate_.dtype)), 2.0 * elements * T);
  for_ranges(team_, I, 16, us, [&](int64_t first, int64_t count) {
    const int rows = static_cast<int>(count), K = static_cast<int>(H);
    if (gate_.dtype == kernels::DType::kBF16) {
      table_.gate_up_bf16(normed, H, static_cast<const uint16_t*>(gate_.row(first)),
                          static_cast<const uint16_t*>(up_.row(first)), gated + first, I, T, rows, K);
    } else {
      table_.gate_up_f32(normed, H, static_cast<const float*>(gate_.row(first)),
                         static_cast<const float*>(up_.row(first)), gated + first, I, T, rows, K);
    }
  });
  linear(table_, team_, gated, T, down_, nullptr, down, hidden);
}

void LmHead::forward(const float* hidden_rows, float* logits, int R) {
  if (R == 0) return;
  const auto lock = team_.lock_scratch();
  float* normed = team_.scratch(0, static_cast<int64_t>(R) * hidden_size());
  norm_rows(table_, team_, hidden_rows, norm_, eps_, normed, R, hidden_size());
  linear(table_, team_, normed, R, weight_, nullptr, logits);
}

}  // namespace twofold
