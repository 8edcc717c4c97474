// Project: a matrix product of a block's rows, with an optional norm of its input and an optional bias.
#pragma once
#include <cstdint>

#include "host/thread_pool.h"
#include "ops/linear.h"
#include "ops/packed_matrix.h"

namespace twofold {

// Null pointers mean absent. Nothing is owned: the creator of the block keeps the arrays.
struct Projection {
  const PackedMatrix* weight = nullptr;
  const float* bias = nullptr;  // [rows]
  const float* norm = nullptr;  // [columns], RMSNorm of the input; null: the input is read as it is
  float eps = 0;                // epsilon of the norm
  bool doubled = false;         // the norm [columns / 2] is of half a row, which the input follows as it is

  int64_t rows() const { return weight->rows(); }
  int64_t columns() const { return weight->columns(); }

  // out [T, rows] = weight . norm(x) + bias; x has T rows, `ld` elements apart, from row `first` of the step on.
  void run(const kernels::KernelTable& table, ThreadPool& pool, const float* x, int64_t ld, int T, float* out,
           int first = 0) const {
    linear(table, pool, {.x = x, .ld = ld, .norm = norm, .eps = eps, .first = first, .doubled = doubled}, T,
           *weight, bias, out);
  }
  // sum [T, rows] += the same of x [T, columns].
  void add(const kernels::KernelTable& table, ThreadPool& pool, const float* x, int T, float* sum,
           int first = 0) const {
    linear(table, pool, {.x = x, .ld = columns(), .norm = norm, .eps = eps, .first = first}, T, *weight, bias,
           sum, true);
  }
};

}  // namespace twofold
