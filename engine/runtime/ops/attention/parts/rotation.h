// Rotate: rotary embedding of the first elements of a head, by its token's position.
#pragma once
#include <algorithm>
#include <cstddef>

#include "ops/attention/attention_batch.h"
#include "twofold/kernels.h"

namespace twofold {

// A head is left in the order of halves, queries and keys alike: pairs are elements i and i + pairs.
struct Rotation {
  int index = 0;            // into the batch's rotations
  bool neighbours = false;  // heads come with pairs 2i and 2i + 1
  bool positions = true;    // false: heads carry no positions and stay as they are

  int pairs(const AttentionBatch& batch) const { return batch.num_rotated_pairs(index); }

  // Rotates 2 * pairs elements of `from` into `to`; the two may not overlap. Without positions they are `size` elements
  // that are copied.
  void apply(const kernels::KernelTable& table, const AttentionBatch& batch, int token, const float* from,
             float* to, int size) const {
    if (!positions) {
      std::copy_n(from, size, to);
      return;
    }
    const int half = pairs(batch);
    for (int i = 0; neighbours && i < half; ++i) {
      to[i] = from[2 * i];
      to[half + i] = from[2 * i + 1];
    }
    if (!neighbours) std::copy_n(from, 2 * half, to);
    table.rope(to, batch.cosine(token, index), batch.sine(token, index), half);
  }
  // The same in place; room [2 * pairs].
  void in_place(const kernels::KernelTable& table, const AttentionBatch& batch, int token, float* head,
                float* room) const {
    if (!positions) return;
    const int half = pairs(batch);
    if (!neighbours) return table.rope(head, batch.cosine(token, index), batch.sine(token, index), half);
    std::copy_n(head, 2 * half, room);
    apply(table, batch, token, room, head, 2 * half);
  }
};

}  // namespace twofold
