// A part of a panel (256 columns) whose weights are unpacked in the first-level cache: worthwhile for
// many tiles of activations where unpacking costs as much as multiplying. To integer_products.h it is the
// panel with other bytes, and with its scales as they multiply sums, once for all tokens.
#pragma once
#include <cstdint>

#include "subblock_scales.h"
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

// Weights of a slice as products take them. A Dot may look up a table's codes in its own way.
template <class V, class Dot, class Format>
[[gnu::always_inline]] inline typename Dot::Weights weights_of(const uint8_t* block, int group, int subblock,
                                                               int slice, int g) {
  if constexpr (requires { Dot::template look_up<Format>(typename V::I()); }) {
    return Dot::template look_up<Format>(Format::template codes<V>(block, group, subblock, slice, g));
  } else {
    return Dot::weights(Format::template bytes<V>(block, group, subblock, slice, g));
  }
}

template <class V, class Dot, class Format>
struct alignas(64) Unpacked {
  using F = typename V::F;
  using Of = SubblockScales<V, Dot, Format>;
  using Number = decltype(Of{nullptr}.number(0, 0, 0));
  static constexpr int kSubblockBytes = 8 * kSliceBytes * Dot::kStoredVectors, kPartSubblocks = 8;
  static constexpr int kPieces = Of::kHalves ? 2 : Dot::kPieces;
  static constexpr bool kOwn = !Format::Kind::kSumsOfBlock;  // a scale for each subblock or half
  static constexpr int kSubblocks = kOwn ? kPartSubblocks : 1,
                       kHalfSubblocks = Of::kNumbers ? kPieces * kPartSubblocks : 1;
  static constexpr bool kOfHalves = Of::kReads && Of::kHalves, kMins = takes_subblock_sums<Format>;

  uint8_t weights[kPartSubblocks * kSubblockBytes];
  alignas(64) float scale[kSubblocks][kPanelRows];
  alignas(64) float less[Of::kReads ? kSubblocks : 1][kPanelRows];
  alignas(64) float min[kMins ? kSubblocks : 1][kPanelRows];
  alignas(64) uint8_t number[kHalfSubblocks][4 * kPanelRows];

  // Where in a subblock the vector of rows `g` of a slice lies.
  static constexpr int at(int slice, int g) {
    return (slice * (kPanelRows / V::kLanes) + g) * V::kBytes * Dot::kStoredVectors;
  }

  Unpacked(const uint8_t* block, int num_blocks) {
    uint8_t* bytes = weights;
    for (int b = 0; b < num_blocks; ++b, block += Format::kPanelBytes) {
      const Of of{block};
#pragma GCC unroll 8
      for (int subblock = 0; subblock < Format::kSubblocks; ++subblock, bytes += kSubblockBytes) {
        for (int g = 0; g < kPanelRows / V::kLanes; ++g) {
#pragma GCC unroll 8
          for (int slice = 0; slice < 8; ++slice) {
            Dot::store(bytes + at(slice, g),
                       weights_of<V, Dot, Format>(block, subblock / Format::kGroupSubblocks,
                                                  subblock % Format::kGroupSubblocks, slice, g));
          }
          if constexpr (kOwn) hold(of, b * Format::kSubblocks, subblock, g);
        }
      }
    }
  }

  // A block's, whose first subblock is subblock `begin` of the part, as SubblockScales has them.
  struct Scales {
    const Unpacked& part;
    int begin;
    const uint8_t* block;
    [[gnu::always_inline]] auto half(int subblock, int piece, int g) const {
      const int i = kPieces * (begin + subblock) + piece, row = V::kLanes * g;
      return typename Of::OfHalf{load<F>(part.number[i], g), V::load(part.less[begin + subblock] + row)};
    }
    [[gnu::always_inline]] auto number(int subblock, int piece, int g) const {
      if constexpr (Of::kNumbers) {
        return load<Number>(part.number[kPieces * (begin + subblock) + piece], g);
      } else {
        return Dot::one();
      }
    }
    [[gnu::always_inline]] auto of_run(int subblock, int g) const {
      const int row = V::kLanes * g;
      typename Of::OfSubblock by{V::load(part.scale[begin + subblock] + row), F(), {}};
      if constexpr (Of::kReads && !Of::kHalves) by.less = V::load(part.less[begin + subblock] + row);
      if constexpr (kMins) by.least.min = V::load(part.min[begin + subblock] + row);
      if constexpr (takes_half_sums<Format>) by.least = Of::Least::of(block, subblock, g);
      return by;
    }
  };
  Scales scales(int b, const uint8_t* block) const { return {*this, b * Format::kSubblocks, block}; }

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

  void hold(const Of& of, int begin, int subblock, int g) {
    const int row = V::kLanes * g;
    const auto by = of.of_run(subblock, g);
    V::store(scale[begin + subblock] + row, by.scale);
    if constexpr (Of::kReads && !Of::kHalves) V::store(less[begin + subblock] + row, by.less);
    if constexpr (kOfHalves) V::store(less[begin + subblock] + row, of.half(subblock, 0, g).less);
    if constexpr (kMins) V::store(min[begin + subblock] + row, by.least.min);
    if constexpr (Of::kNumbers) {
      for (int piece = 0; piece < kPieces; ++piece)
        put(number[kPieces * (begin + subblock) + piece] + V::kBytes * g, of.number(subblock, piece, g));
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
