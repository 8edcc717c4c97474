// Parts of attention that the CPU's and the device's kernels share: which positions a query attends to, and what becomes of a
// score. A field is declared once, here: the bindings take it from these lists.
#pragma once
#include <math.h>

#include <cstdint>

#include "twofold/host_device.h"

namespace twofold::kernels {

// Kinds of selection that are one stretch of positions: all up to the query's own, a sliding window, a chunk. TYPE, name,
// default.
#define TWOFOLD_STRETCH(FIELD)                                                             \
  FIELD(int, window, 0) /* the last so many positions, the query's own included; 0: all */ \
  FIELD(int, chunk, 0)  /* positions of the query's own chunk of so many; 0: there are none */

// A rule of the scores, applied to the product of a query and a key.
#define TWOFOLD_SCORE_RULE(FIELD)                         \
  FIELD(float, scale, 1.0f)   /* factor of the product */ \
  FIELD(float, softcap, 0.0f) /* above 0: scaled products become softcap * tanh(product / softcap) */

#define TWOFOLD_DECLARE_FIELD(type, name, otherwise) type name = otherwise;

struct Stretch {
  TWOFOLD_STRETCH(TWOFOLD_DECLARE_FIELD)

  // First position that the query at `position` attends to; the last one is its own. Never falls with the position.
  TWOFOLD_HD constexpr int first(int position) const {
    int from = window > 0 && position >= window ? position + 1 - window : 0;
    if (chunk > 0 && position - position % chunk > from) from = position - position % chunk;
    return from;
  }
};

// Positions chosen one by one for each query, all up to its own; a query attends to those of them that its stretch has.
struct PositionLists {
  const int32_t* positions =
      nullptr;                      // [queries][lists][most], ascending; null: all positions of the stretch
  const int32_t* counts = nullptr;  // [queries][lists] positions of each list
  int most = 0;
  int lists = 1;  // lists per query, each for as many adjacent heads

  // Number of the first entry of an ascending list that is not before `position`.
  TWOFOLD_HD static constexpr int entry_from(const int32_t* list, int count, int position) {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (list[middle] < position)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

struct ScoreRule {
  TWOFOLD_SCORE_RULE(TWOFOLD_DECLARE_FIELD)

  // Whether a score is the scaled product itself.
  TWOFOLD_HD constexpr bool is_linear() const { return softcap <= 0; }
  // The score of a scaled product.
  TWOFOLD_HD float of(float scaled) const { return is_linear() ? scaled : softcap * tanhf(scaled / softcap); }
};

#undef TWOFOLD_DECLARE_FIELD

}  // namespace twofold::kernels
