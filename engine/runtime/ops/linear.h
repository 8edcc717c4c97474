// Products of activations with packed matrices over a thread pool. The result does not depend on how the work
// is cut (see packed_kernels.h on determinism).
#pragma once
#include <algorithm>
#include <span>

#include "host/thread_pool.h"
#include "ops/packed_matrix.h"
#include "twofold/kernels.h"

namespace twofold {

// Estimated time of work on one ordinary core, by the bytes it reads and the operations it does; work below
// kForkUs is not worth waking a thread.
inline constexpr double kForkUs = 6.0;
inline double work_us(double bytes, double flops) {
  const double read = bytes / 30e3, compute = flops / 60e3;  // 30 GB/s and 60 GFLOP/s of plain arithmetic
  return read > compute ? read : compute;
}
// The same of products with packed weights, which compute faster.
inline double product_us(double bytes, double flops) {
  const double read = bytes / 30e3, compute = flops / 400e3;
  return read > compute ? read : compute;
}

// Calls body(first, count) over [0, num_items) in pieces of a multiple of `grain` items, on the pool when the
// whole is worth a fork, on the calling thread otherwise.
void for_ranges(ThreadPool& pool, int64_t num_items, int64_t grain, double total_us,
                FunctionRef<void(int64_t first, int64_t count)> body);

// Runs the phases on the pool when the whole is worth a fork, on the calling thread otherwise.
void for_phases(ThreadPool& pool, std::span<const LoopPhase> phases, double total_us,
                ThreadPool::PhasesBody body);

// Panels that one chunk multiplies with M rows: some microseconds of work, and enough chunks to share out.
int64_t panels_per_chunk(double us_per_panel, double M, int64_t num_panels, int num_threads);

// Rows [M, K] of float32, `ld` apart; normed first (rmsnorm) where `norm` is not null. The first is row `first` of the
// step, whose rows may use adapters.
struct InputRows {
  const float* x;
  int64_t ld;
  const float* norm = nullptr;
  float eps = 0;
  int64_t first = 0;
  bool doubled =
      false;  // x has K / 2 values: normed they are the first half of a row, as they are the second

  // Row m of K values, normed into `temporary` where there is a norm.
  const float* row(const kernels::KernelTable& table, int64_t m, int64_t K, float* temporary) const {
    if (norm == nullptr) return x + m * ld;
    const int64_t normed = doubled ? K / 2 : K;
    table.rmsnorm(x + m * ld, norm, eps, temporary, static_cast<int>(normed));
    std::copy_n(x + m * ld, K - normed, temporary + normed);
    return temporary;
  }
};

// Addresses of encoded activations, for each requested kind.
class EncodedRows {
 public:
  EncodedRows(const kernels::KernelTable& table, std::span<const kernels::WeightFormat> formats,
              int64_t columns);

  int64_t bytes(int64_t rows) const { return rows * row_bytes_; }
  void place(std::byte* memory, int64_t rows);
  // Norms and encodes row `from` of the input to row `to`; `temporary` holds `columns` floats.
  void encode(const InputRows& input, int64_t from, int64_t to, float* temporary) const;
  void copy(int64_t from, int64_t to) const;

  const std::byte* row(kernels::ActivationKind kind, int64_t r) const {
    return base_[int(kind)] + r * stride_[int(kind)];
  }
  std::byte* writable_row(kernels::ActivationKind kind, int64_t r) const {
    return base_[int(kind)] + r * stride_[int(kind)];
  }
  int64_t stride(kernels::ActivationKind kind) const { return stride_[int(kind)]; }
  int64_t columns() const { return columns_; }

 private:
  const kernels::KernelTable& table_;
  int64_t columns_;
  int64_t row_bytes_ = 0;
  bool wanted_[kernels::kNumActivationKinds] = {};
  int64_t stride_[kernels::kNumActivationKinds] = {};
  std::byte* base_[kernels::kNumActivationKinds] = {};
};

// y[m, n] = input_m . w_n + bias[n] (bias may be null), and what the row's adapter adds (low_rank.h); added to y with
// `add`. y is [M, rows of w]. Takes scratch slots kLinearScratch and kLowRankScratch; the caller holds the lock. Where w is cut over ranks, rank 0 calls this and the other
// ranks compute their rows.
inline constexpr int kLinearScratch = 0, kLowRankScratch = 5;
void linear(const kernels::KernelTable& table, ThreadPool& pool, const InputRows& input, int M,
            const PackedMatrix& w, const float* bias, float* y, bool add = false);

// One of several products of the same input, as linear takes it.
struct Product {
  const PackedMatrix& w;
  const float* bias;
  float* y;
  bool add = false;
};
// Products with matrices that are all cut over the same ranks, in one message to each.
void linear_over_ranks(const kernels::KernelTable& table, ThreadPool& pool, const InputRows& input, int M,
                       std::span<const Product> products);

// The same of the rows that this rank holds, y being [M, width of w].
void own_linear(const kernels::KernelTable& table, ThreadPool& pool, const InputRows& input, int M,
                const PackedMatrix& w, const float* bias, float* y, bool add = false);

// out_m = rmsnorm(x_m) for M rows of n.
void norm_rows(const kernels::KernelTable& table, ThreadPool& pool, const float* x, const float* weight,
               float eps, float* out, int M, int n);

}  // namespace twofold
