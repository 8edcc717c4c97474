// Matrix products over a thread team: rows of activations against all rows of a weight, cut into chunks of
// weight rows. How the work is cut, or whether it is cut at all, never shows in the result (see kernels.h on
// determinism).
#pragma once
#include "tensor_view.h"
#include "thread_team.h"
#include "twofold/kernels.h"

namespace twofold {

// Estimated time of a loop on one core; below kForkUs it is not worth waking anyone.
inline constexpr double kForkUs = 6.0;
inline double work_us(double bytes, double flops) {
  const double read = bytes / 30e3, compute = flops / 60e3;  // 30 GB/s and 60 GFLOP/s: one ordinary core
  return read > compute ? read : compute;
}

// One matmul of the table by the weight's type, on rows [first, first + count) of the weight.
inline void matmul_rows(const kernels::KernelTable& table, const float* x, int64_t ldx, const Weight& w,
                        int64_t first, int count, float* y, int64_t ldy, int M) {
  const int K = static_cast<int>(w.cols);
  if (w.dtype == kernels::DType::kBF16) {
    table.matmul_bf16(x, ldx, static_cast<const uint16_t*>(w.row(first)), y, ldy, M, count, K);
  } else {
    table.matmul_f32(x, ldx, static_cast<const float*>(w.row(first)), y, ldy, M, count, K);
  }
}

// Calls body(first, count) over [0, num_items) in pieces of a multiple of `grain` items, on the team when the
// whole is worth a fork, at once otherwise.
void for_ranges(ThreadTeam& team, int64_t num_items, int64_t grain, double total_us,
                FunctionRef<void(int64_t first, int64_t count)> body);

// y[m, n] = x_m . w_n + bias[n] (bias may be null). With `residual`, y is scratch and residual[m, n] += that
// instead.
void linear(const kernels::KernelTable& table, ThreadTeam& team, const float* x, int M, const Weight& w,
            const float* bias, float* y, float* residual = nullptr);

// out_m = rmsnorm(x_m) for M rows of n.
void norm_rows(const kernels::KernelTable& table, ThreadTeam& team, const float* x, const float* weight,
               float eps, float* out, int M, int n);

}  // namespace twofold
