// Which positions a launch of decode attention reads for a sequence's query. Index arithmetic only, as in launch_shapes.h.
#pragma once
#include <cstdint>

#include "twofold/attention_parts.h"
#include "twofold/host_device.h"

namespace twofold::cuda {

// What a head of a sequence's query attends to: positions, or entries of its list, [first, length).
struct Attended {
  int first;
  int length;
  const int32_t* list;
};
// kChosen: whether positions are chosen. A sequence without positions attends to nothing, whatever its list is.
template <bool kChosen>
TWOFOLD_HD constexpr Attended attended(const kernels::PositionLists& chosen, const kernels::Stretch& select,
                                       int sequence, int length, int head, int num_heads) {
  const int first = select.first(length - 1);
  if constexpr (!kChosen) return {first, length, nullptr};
  const int64_t row = int64_t(sequence) * chosen.lists + head * chosen.lists / num_heads;
  const int32_t* list = chosen.positions + row * chosen.most;
  const int count = length > 0 ? chosen.counts[row] : 0;
  return {kernels::PositionLists::entry_from(list, count, first), count, list};
}
// Bound of a launch's `length`.
TWOFOLD_HD constexpr int most_attended(const kernels::PositionLists& chosen, int max_length) {
  return chosen.positions != nullptr && chosen.most < max_length ? chosen.most : max_length;
}

}  // namespace twofold::cuda
