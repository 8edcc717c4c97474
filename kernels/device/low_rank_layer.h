// Adapters (LoRA) on the device: a row that uses one gets W x + B (A x), with an adapter's own A and B for each matrix, expert or
// head. Plain C++ launchers.
//
// Factors lie anywhere in device memory and are found through a table at a fixed address, so that a graph outlives loads and
// unloads of adapters. A row's result depends on its own adapter alone: it is computed in an order that sizes fix.
#pragma once
#include <cstdint>

#include "expert_layer.h"

namespace twofold::cuda {

// A and B for rows [first_row, first_row + rows) of a product. Written by the host.
struct LowRankFactors {
  const void* a;  // [rank][columns]
  const void* b;  // [rank][rows]: transposed, so that neighbouring threads read neighbouring elements
  int32_t first_row;
  int32_t rows;
  int32_t rank;    // 0: nothing to add
  int32_t is_f32;  // 1: a, 2: b; else bf16
};

// [adapters][entries][stride] factors in device memory. An entry is an expert or a head; a plain matrix has one.
struct LowRankTable {
  const LowRankFactors* factors;
  int num_entries;
  int stride;  // factors of an entry
  int first;   // those of this product: [first, first + count)
  int count;
  int max_rank;  // room for the ranks of each
};

// The rows of a product: `per_token` for each of a step's tokens.
struct AdaptedRows {
  const int32_t* adapters;  // [tokens] number of the token's adapter; below 0: none
  const int32_t* entries;   // [tokens][per_token], below 0: padding; null: the row's place in its token
  const uint8_t*
      where;  // [tokens][per_token] (placement.h); rows of the CPU and padding are left alone. null: all are here
  int num_tokens;
  int per_token;
};

// x of row r: begins `stride` elements after that of row r - 1, which has `divisor` rows in common with its neighbours.
struct LowRankInput {
  const void* x;  // [rows / divisor][stride]
  bool is_f32;    // else bf16
  int divisor;    // row / divisor is the row of x
  int columns;
  int64_t stride;
};

struct LowRankOutput {
  void* y;      // [rows][stride]
  bool is_f32;  // else bf16
  bool adds;    // false: y is overwritten, by zeros where no adapter changes it
  int width;    // columns of y
  int64_t stride;
};

inline bool can_adapt(const LowRankTable& table, const AdaptedRows& rows, const float* t) {
  return table.factors != nullptr && table.num_entries >= 1 && table.first >= 0 && table.count >= 1 &&
         table.first + table.count <= table.stride && table.max_rank >= 1 && rows.adapters != nullptr &&
         rows.num_tokens >= 1 && rows.per_token >= 1 && t != nullptr &&
         (rows.entries != nullptr || rows.per_token == table.num_entries);
}

// t[row][count][max_rank] = row ids[row] of A [ids][rank], of each row that uses an adapter: of the embedding, A is the adapter's
// B, or an adapter's own table.
int launch_low_rank_gather(const LowRankTable& table, const AdaptedRows& rows, const int64_t* ids, float* t,
                           Stream stream);

// t[row][count][max_rank] = A x of each row that uses an adapter; other elements are left alone.
int launch_low_rank_down(const LowRankTable& table, const AdaptedRows& rows, const LowRankInput& input,
                         float* t, Stream stream);

// y[row] += B t, or = B t.
int launch_low_rank_up(const LowRankTable& table, const AdaptedRows& rows, const float* t,
                       const LowRankOutput& output, Stream stream);

}  // namespace twofold::cuda
