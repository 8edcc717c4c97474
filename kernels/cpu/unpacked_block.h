// A part of a panel (256 columns) whose weights lie in the first-level cache as products take them: what many
// tiles of activations are worth where unpacking costs as much as multiplying. To integer_products.h it is the
// panel with other bytes; scales are read from the panel itself.
#pragma once
#include <cstdint>

#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

// How V multiplies a format's weights; V::FloatScaled is what multiplies by scales that are floats, V::LookedUp what looks
// up a table's bytes.
template <class V, class Format>
struct DotOf {
  using type = typename V::template Dot<Format::kDotBits>;
};
template <class V, class Format>
  requires requires { typename V::FloatScaled; } && (Format::kSub == SubScale::kFloat)
struct DotOf<V, Format> {
  using type = typename V::FloatScaled;
};
template <class V, class Format>
  requires requires { typename V::LookedUp; } && has_table<Format> && (Format::kDotBits == 8)
struct DotOf<V, Format> {
  using type = typename V::LookedUp;
};

// Weights of a step as products take them. A Dot may look up a table's codes in its own way.
template <class V, class Dot, class Format>
[[gnu::always_inline]] inline typename Dot::Weights weights_of(const uint8_t* block, int group, int run,
                                                               int step, int g) {
  if constexpr (requires { Dot::template look_up<Format>(typename V::I()); }) {
    return Dot::template look_up<Format>(Format::template codes<V>(block, group, run, step, g));
  } else {
    return Dot::weights(Format::template bytes<V>(block, group, run, step, g));
  }
}

template <class V, class Dot, class Format>
struct Unpacked {
  static constexpr int kRunBytes = 8 * kStepBytes * Dot::kStoredVectors;

  // Where in a run the vector of rows `g` of a step lies.
  static constexpr int at(int step, int g) {
    return (step * (kPanelRows / V::kLanes) + g) * V::kBytes * Dot::kStoredVectors;
  }

  static void unpack(const uint8_t* block, int num_blocks, uint8_t* bytes) {
    for (int b = 0; b < num_blocks; ++b, block += Format::kPanelBytes) {
#pragma GCC unroll 8
      for (int run = 0; run < Format::kRuns; ++run, bytes += kRunBytes) {
        for (int g = 0; g < kPanelRows / V::kLanes; ++g) {
#pragma GCC unroll 8
          for (int step = 0; step < 8; ++step) {
            Dot::store(bytes + at(step, g), weights_of<V, Dot, Format>(block, run / Format::kGroupRuns,
                                                                       run % Format::kGroupRuns, step, g));
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
