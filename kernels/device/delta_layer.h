// A gated delta net on the device: the kernels between the layer's projections. A plain C++ launcher.
#pragma once
#include <cstdint>

#include "expert_layer.h"

namespace twofold::cuda {

inline constexpr int kDeltaBlockColumns = 32;  // state columns that one block carries
inline constexpr int kDeltaMaxKeys = 256;      // largest key dimension

// Floats that a block keeps of a sequence: the state [keys][columns] before the last token, then that token's
// update: its key, its delta [columns], the decay, and its position. So a token that is recomputed because its step
// was lost starts from the same state.
constexpr int64_t delta_slab_floats(int key_dim) {
  return (int64_t(key_dim) * (kDeltaBlockColumns + 1) + kDeltaBlockColumns + 2 + 3) / 4 * 4;
}

// Records of one layer. Value heads of one key head are neighbours.
struct DeltaRecords {
  float* slabs;  // [records][value heads][blocks of columns][delta_slab_floats]
  const void*
      tail;  // bf16 [records][taps][channels]: what the convolution was given at position p in slot p % taps
  int num_k_heads;
  int num_v_heads;
  int key_dim;  // at most kDeltaMaxKeys
  int value_dim;
  int taps;
};

// `num_tokens` consecutive tokens of each sequence, sequence s in rows s * num_tokens onwards. With `chain`, num_tokens is
// 1 and each row has a record: a row whose chain is c > 0 continues the sequence of the c rows before it, which begins
// from its first row's record, and its state goes to its own record.
struct DeltaRows {
  const void* projected;  // bf16, rows `stride` apart: all queries, keys, values (the channels), z, b, a
  int64_t stride;
  const float* conv;         // [channels][taps]
  const float* decay_rate;   // [value heads], negative
  const float* decay_bias;   // [value heads]
  const int64_t* positions;  // position of each row
  const int32_t* records;    // [sequences], negative: padding, whose output is zero
  int num_sequences;
  int num_tokens;
  const int32_t* chain;  // [num_sequences]; null: every row begins a sequence
};

// out: f32 [rows][value heads][value_dim]. Slabs are carried on; the tail is the caller's to write, afterwards.
int launch_delta(const DeltaRows& rows, const DeltaRecords& records, float* out, Stream stream);

}  // namespace twofold::cuda
