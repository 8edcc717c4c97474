// Whole matrices as rows of a weight format, made by a pool.
#pragma once
#include <cstdint>

#include "host/thread_pool.h"
#include "twofold/weight_format.h"

namespace twofold {

// x is [rows, columns]; `importance` (null: all 1) weighs the error of each column; out is [rows,
// source_row_bytes]. Not for fp8, whose scales lie outside the rows.
void quantise_rows(ThreadPool& pool, kernels::WeightFormat format, const float* x, const float* importance,
                   int64_t rows, int64_t columns, uint8_t* out);

}  // namespace twofold
