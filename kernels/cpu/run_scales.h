// What multiplies the integer sums of a run of a panel block, for integer_products.h. Anonymous namespace: each file that
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
struct RunScales {
  using F = typename V::F;
  static constexpr bool kHalves = Format::kScale == ScaleOf::kHalf;
  static constexpr bool kSub = requires { Format::sub_at(0, 0); } && (kHalves || Dot::kIntegerScales);
  static constexpr bool kRunMins = !kHalves && Format::kMin;
  // Whether sums are read so; of a half its first one. A block's scale multiplies no sum of integers, sums of four_codes.h
  // begin without, and in 16 registers one more vector pushes sums out (five tokens of Q4_0: 0.78).
  static constexpr bool kReads = requires { Dot::readable(); } && V::kLanes == 16 &&
                                 Format::kScale != ScaleOf::kBlock && Format::kCodes != 4;

  const uint8_t* block;

  // Start value of a run's integer sum.
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
  struct OfRun {
    F scale, less, min;
  };
  static F less_of(F scale) { return V::mul(scale, V::set1(-kReadableFloat)); }

  [[gnu::always_inline]] auto sub(int run, int piece, int g) const {
    if constexpr (has_sub_pairs<Format>) {
      return Dot::pair_scale(block + Format::sub_at(run, 0) + 2 * V::kLanes * g, piece);
    } else if constexpr (kSub) {
      return Dot::template sub_scale<Format::kSub>(block + Format::sub_at(run, piece) + V::kLanes * g);
    } else {
      return Dot::one();
    }
  }
  [[gnu::always_inline]] OfHalf half(int run, int piece, int g) const {
    const F scale = sub(run, piece, g);
    return {scale, less_of(scale)};
  }
  [[gnu::always_inline]] OfRun of_run(int run, int g) const {
    OfRun by;
    if constexpr (kSub) {
      by.scale = Format::template block_scale<V>(block, g);
    } else {
      by.scale = Format::template scale<V>(block, run, g);
    }
    if constexpr (kReads && !kHalves) by.less = less_of(by.scale);
    if constexpr (kRunMins && Format::kScale == ScaleOf::kRun)
      by.min = Format::template min<V>(block, run, g);
    return by;
  }
};

}  // namespace
}  // namespace twofold::kernels
