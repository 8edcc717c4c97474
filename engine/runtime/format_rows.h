// Whole matrices between float32 and the rows of a weight format, their rows shared among a team.
#pragma once
#include <cstdint>

#include "thread_team.h"
#include "twofold/weight_format.h"

namespace twofold {

// x is [rows, columns]; `importance` (null: all 1) weighs the error of each column; out is [rows,
// source_row_bytes]. Not for fp8, whose scales lie outside the rows.
void quantise_rows(ThreadTeam& team, kernels::WeightFormat format, const float* x, const float* importance,
                   int64_t rows, int64_t columns, uint8_t* out);

// The inverse; fp8 takes `scales` [rows / 128, columns / 128], rounded up, other formats null.
void dequantise_rows(ThreadTeam& team, kernels::WeightFormat format, const uint8_t* from, const float* scales,
                     int64_t rows, int64_t columns, float* out);

}  // namespace twofold
