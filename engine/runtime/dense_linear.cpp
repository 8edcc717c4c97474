#include "dense_linear.h"

#include <algorithm>

namespace twofold {

void for_ranges(ThreadTeam& team, int64_t num_items, int64_t grain, double total_us,
                FunctionRef<void(int64_t, int64_t)> body) {
  if (num_items == 0) return;
  if (team.num_threads() == 1 || total_us < kForkUs) return body(0, num_items);
  // Pieces of 3 us or more, and some for every thread to steal: four each.
  const int64_t wanted = std::clamp<int64_t>(static_cast<int64_t>(total_us / 3.0), 2, 4 * team.num_threads());
  const int64_t size = std::max(grain, (num_items + wanted * grain - 1) / (wanted * grain) * grain);
  team.parallel_for((num_items + size - 1) / size, [&](int64_t chunk, int) {
    const int64_t first = chunk * size;
    body(first, std::min(size, num_items - first));
  });
}

void linear(const kernels::KernelTable& table, ThreadTeam& team, const float* x, int M, const Weight& w,
            const float* bias, float* y, float* residual) {
  const int64_t N = w.rows, K = w.cols;
  const double elements = static_cast<double>(N) * static_cast<double>(K);
  const double us =
      work_us(elements * static_cast<double>(kernels::element_bytes(w.dtype)), 2.0 * elements * M);
  for_ranges(team, N, 16, us, [&](int64_t first, int64_t count) {
    matmul_rows(table, x, K, w, first, static_cast<int>(count), y + first, N, M);
    if (bias == nullptr && residual == nullptr) return;
    for (int64_t m = 0; m < M; ++m) {
      float* row = y + m * N;
      if (bias != nullptr) {
        for (int64_t n = first; n < first + count; ++n) row[n] += bias[n];
      }
      if (residual != nullptr) {
        float* sum = residual + m * N;
        for (int64_t n = first; n < first + count; ++n) sum[n] += row[n];
      }
    }
  });
}

void norm_rows(const kernels::KernelTable& table, ThreadTeam& team, const float* x, const float* weight,
               float eps, float* out, int M, int n) {
  const double us = work_us(8.0 * M * n, 4.0 * M * n);
  for_ranges(team, M, 1, us, [&](int64_t first, int64_t count) {
    for (int64_t m = first; m < first + count; ++m) table.rmsnorm(x + m * n, weight, eps, out + m * n, n);
  });
}

}  // namespace twofold
