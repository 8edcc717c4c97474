// What multiplies the integer sums of a subblock of a panel block, for integer_products.h. Anonymous namespace: each file that
// includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <cstdint>

#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

// 1.5 * 2^23 as a float. A sum that begins with these bits is, read as a float, kReadableFloat and the sum: exact below
// 2^22 in size. So instead of being converted and multiplied by a scale it is multiplied, and what that is of
// kReadableFloat taken away, in one instruction that rounds once: the same bits, if the scale times kReadableFloat is a float
// (scales of up to 22 bits, below 2^104: of MXFP4, whose scales may be greater, others become infinite).
inline constexpr int32_t kReadable = 0x4b400000;
inline constexpr float kReadableFloat = 12582912.0F;

template <class V, class Dot, class Format>
struct SubblockScales {
  using F = typename V::F;
  using Kind = typename Format::Kind;
  using Least = typename Kind::template Least<V, Format>;
  static constexpr bool kHalves = Kind::kSums > 1;
  // Whether sums are multiplied by the numbers that their block's scale multiplies.
  static constexpr bool kNumbers = has_numbers<Format> && (kHalves || Dot::kIntegerScales);
  // Whether sums are read so; of two halves' the first. A block's scale multiplies no sum of integers, sums of four_codes.h
  // begin without, and in 16 registers one more vector pushes sums out (five tokens of Q4_0: 0.78).
  static constexpr bool kReads =
      requires { Dot::readable(); } && V::kLanes == 16 && !Kind::kSumsOfBlock && Format::kUnitSubblocks != 4;

  const uint8_t* block;

  // Start value of a subblock's integer sum.
  static typename Dot::Sum begin(const int32_t* zero, int piece) {
    if constexpr (Format::kZero != 0) return Dot::begin(zero);
    if constexpr (kReads) {
      if (piece == 0) return Dot::readable();
    }
    return Dot::none();
  }

  struct OfHalf {
    F scale, less;
  };
  // What joins a subblock's sum to the totals of a vector of rows.
  struct OfSubblock {
    F scale, less;
    Least least;
    [[gnu::always_inline]] F add(F sum, const TokenSubblock& x, F total) const {
      return least.join(kReads && !kHalves ? V::fma(sum, scale, less) : V::mul(sum, scale), x, total);
    }
  };
  static F less_of(F scale) { return V::mul(scale, V::set1(-kReadableFloat)); }

  [[gnu::always_inline]] auto number(int subblock, int piece, int g) const {
    if constexpr (kNumbers) {
      return numbers_of<typename Dot::Numbers, Format>(block, subblock, piece, g);
    } else {
      return Dot::one();
    }
  }
  [[gnu::always_inline]] OfHalf half(int subblock, int piece, int g) const {
    const F scale = number(subblock, piece, g);
    return {scale, less_of(scale)};
  }
  [[gnu::always_inline]] OfSubblock of_run(int subblock, int g) const {
    OfSubblock by{scale(subblock, g), F(), Least::of(block, subblock, g)};
    if constexpr (kReads && !kHalves) by.less = less_of(by.scale);
    return by;
  }

  // What multiplies a subblock's piece-th sum of integers; `scales` are these or an unpacked part's.
  template <class ScalesOf>
  [[gnu::always_inline]] static auto factor(const ScalesOf& scales, int subblock, int piece, int g) {
    if constexpr (kReads && kHalves) {
      return scales.half(subblock, piece, g);
    } else {
      return scales.number(subblock, piece, g);
    }
  }
  // Adds it to the subblock's total.
  template <class Factor>
  [[gnu::always_inline]] static void add(int piece, typename Dot::Sum sum, const Factor& by,
                                         typename Dot::Total& total) {
    if constexpr (kReads && kHalves) {
      total = piece == 0 ? V::fma(V::as_float(sum), by.scale, by.less) : Dot::next(total, sum, by.scale);
    } else if constexpr (kReads) {
      total = V::as_float(sum);
    } else {
      total = piece == 0 ? Dot::first(sum, by) : Dot::next(total, sum, by);
    }
  }

 private:
  [[gnu::always_inline]] F scale(int subblock, int g) const {
    if constexpr (kNumbers) {
      return Format::template block_scale<V>(block, g);
    } else {
      return Format::template scale<V>(block, subblock, 0, g);
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
