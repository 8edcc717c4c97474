// A part of a panel (256 columns) whose weights are unpacked in the first-level cache: worthwhile for
// many tiles of activations where unpacking costs as much as multiplying. To integer_products.h it is the
// panel with other bytes, and with its scales as they multiply sums, once for all tokens.
#pragma once
#include <cstdint>

#include "run_scales.h"
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
  requires requires { typename V::FloatScaled; } && has_float_numbers<Format>
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
struct alignas(64) Unpacked {
  using F = typename V::F;
  using Of = RunScales<V, Dot, Format>;
  using Number = decltype(Of{nullptr}.number(0, 0, 0));
  static constexpr int kRunBytes = 8 * kStepBytes * Dot::kStoredVectors, kPartRuns = 8;
  static constexpr int kPieces = Of::kHalves ? 2 : Dot::kPieces;
  static constexpr bool kOwn = !Format::Kind::kOfBlock;  // a scale for each run or half
  static constexpr int kRuns = kOwn ? kPartRuns : 1, kHalfRuns = Of::kNumbers ? kPieces * kPartRuns : 1;
  static constexpr bool kOfHalves = Of::kReads && Of::kHalves, kMins = takes_run_sums<Format>;

  uint8_t weights[kPartRuns * kRunBytes];
  alignas(64) float scale[kRuns][kPanelRows];
  alignas(64) float less[Of::kReads ? kRuns : 1][kPanelRows];
  alignas(64) float min[kMins ? kRuns : 1][kPanelRows];
  alignas(64) uint8_t number[kHalfRuns][4 * kPanelRows];

  // Where in a run the vector of rows `g` of a step lies.
  static constexpr int at(int step, int g) {
    return (step * (kPanelRows / V::kLanes) + g) * V::kBytes * Dot::kStoredVectors;
  }

  Unpacked(const uint8_t* block, int num_blocks) {
    uint8_t* bytes = weights;
    for (int b = 0; b < num_blocks; ++b, block += Format::kPanelBytes) {
      const Of of{block};
#pragma GCC unroll 8
      for (int run = 0; run < Format::kRuns; ++run, bytes += kRunBytes) {
        for (int g = 0; g < kPanelRows / V::kLanes; ++g) {
#pragma GCC unroll 8
          for (int step = 0; step < 8; ++step) {
            Dot::store(bytes + at(step, g), weights_of<V, Dot, Format>(block, run / Format::kGroupRuns,
                                                                       run % Format::kGroupRuns, step, g));
          }
          if constexpr (kOwn) hold(of, b * Format::kRuns, run, g);
        }
      }
    }
  }

  // A block's, whose first run is run `begin` of the part, as RunScales has them.
  struct Scales {
    const Unpacked& part;
    int begin;
    const uint8_t* block;
    [[gnu::always_inline]] auto half(int run, int piece, int g) const {
      const int i = kPieces * (begin + run) + piece, row = V::kLanes * g;
      return typename Of::OfHalf{load<F>(part.number[i], g), V::load(part.less[begin + run] + row)};
    }
    [[gnu::always_inline]] auto number(int run, int piece, int g) const {
      if constexpr (Of::kNumbers) {
        return load<Number>(part.number[kPieces * (begin + run) + piece], g);
      } else {
        return Dot::one();
      }
    }
    [[gnu::always_inline]] auto of_run(int run, int g) const {
      const int row = V::kLanes * g;
      typename Of::OfRun by{V::load(part.scale[begin + run] + row), F(), {}};
      if constexpr (Of::kReads && !Of::kHalves) by.less = V::load(part.less[begin + run] + row);
      if constexpr (kMins) by.least.min = V::load(part.min[begin + run] + row);
      if constexpr (takes_half_sums<Format>) by.least = Of::Least::of(block, run, g);
      return by;
    }
  };
  Scales scales(int b, const uint8_t* block) const { return {*this, b * Format::kRuns, block}; }

 private:
  template <class E>
  static E load(const uint8_t* p, int g) {
    if constexpr (__is_same(E, F)) {
      return V::load(reinterpret_cast<const float*>(p) + V::kLanes * g);
    } else {
      return V::load(p + V::kBytes * g);
    }
  }
  static void put(uint8_t* p, F v) { V::store(reinterpret_cast<float*>(p), v); }
  static void put(uint8_t* p, typename V::I v) { V::store(p, v); }

  void hold(const Of& of, int begin, int run, int g) {
    const int row = V::kLanes * g;
    const auto by = of.of_run(run, g);
    V::store(scale[begin + run] + row, by.scale);
    if constexpr (Of::kReads && !Of::kHalves) V::store(less[begin + run] + row, by.less);
    if constexpr (kOfHalves) V::store(less[begin + run] + row, of.half(run, 0, g).less);
    if constexpr (kMins) V::store(min[begin + run] + row, by.least.min);
    if constexpr (Of::kNumbers) {
      for (int piece = 0; piece < kPieces; ++piece)
        put(number[kPieces * (begin + run) + piece] + V::kBytes * g, of.number(run, piece, g));
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
