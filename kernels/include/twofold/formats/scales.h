// Scales of integer formats: where they belong in a sum, how the numbers are read that a block's scale multiplies, and the
// layouts that several formats share. panel.h says what a format's scales must have.
#pragma once
#include "panel.h"

namespace twofold::kernels {

// What a kernel knows of a token's subblock besides its integers, one after the other: the scale, the scale times the sum of the
// integers, and the sums of both halves' integers in 16 bits each.
struct TokenSubblock {
  const float* scale;
  const float* sum;
  const int32_t* halves;

  TWOFOLD_ALWAYS TokenSubblock at(int i) const { return {scale + i, sum + i, halves + i}; }
};

// ---- Kinds: the arithmetic that all levels of the CPU share, so that all have the same bits ----
// kSums: sums of integers in a subblock, each with a number of its own. kSumsOfBlock: a panel block's subblocks are added up before its
// scale multiplies them. Least<V, Format>: the minima of a vector of rows, and how a subblock's scaled sum joins the total.

// Every subblock has its own scale: total += (sum * scale) * x_scale, and with minima += x_sum * min.
struct PerSubblock {
  static constexpr int kSums = 1;
  static constexpr bool kSumsOfBlock = false;
  static constexpr int place(int subblock, int /*half*/) { return subblock; }

  template <class V, class Format>
  struct Least {
    typename V::F min;
    TWOFOLD_ALWAYS static Least of(const uint8_t* block, int subblock, int g) {
      return {Format::template min<V>(block, subblock, 0, g)};
    }
    TWOFOLD_ALWAYS typename V::F join(typename V::F of_run, const TokenSubblock& x,
                                      typename V::F total) const {
      total = V::fma(of_run, V::set1(*x.scale), total);
      if constexpr (Format::kMin) total = V::fma(V::set1(*x.sum), min, total);
      return total;
    }
  };
};

// Every 16 columns have their own: total += ((sum_0 * scale_0 + sum_1 * scale_1) [+ minima]) * x_scale.
struct PerHalf {
  static constexpr int kSums = 2;
  static constexpr bool kSumsOfBlock = false;
  static constexpr int place(int subblock, int half) { return 2 * subblock + half; }

  template <class V, class Format>
  struct Least {
    typename V::F min;
    typename V::I halves;
    TWOFOLD_ALWAYS static Least of(const uint8_t* block, int subblock, int g) {
      Least least{};
      if constexpr (Format::kMin) {
        least.min = Format::template block_min<V>(block, g);
        least.halves = V::high_pairs(block + Format::sub_at(subblock, 0) + 2 * V::kLanes * g);
      }
      return least;
    }
    TWOFOLD_ALWAYS typename V::F join(typename V::F of_run, const TokenSubblock& x,
                                      typename V::F total) const {
      if constexpr (Format::kMin) {
        const typename V::I sums = V::pair_products(halves, V::same(*x.halves));
        of_run = V::fma(V::to_float(sums), min, of_run);
      }
      return V::fma(of_run, V::set1(*x.scale), total);
    }
  };
};

// A panel block shares one: block += sum * x_scale, then total += block * scale; with minima, of two subblocks, += x_sums * min.
struct PerBlock : PerSubblock {
  static constexpr bool kSumsOfBlock = true;

  template <class V>
  TWOFOLD_ALWAYS static typename V::F add(int subblock, typename V::F sum, const TokenSubblock& x,
                                          typename V::F of_block) {
    const typename V::F scale = V::set1(*x.scale);
    return subblock == 0 ? V::mul(sum, scale) : V::fma(sum, scale, of_block);
  }
  // x: the block's first subblock.
  template <class V, class Format>
  TWOFOLD_ALWAYS static typename V::F join(typename V::F of_block, typename V::F scale, typename V::F min,
                                           const TokenSubblock& x, typename V::F total) {
    total = V::fma(of_block, scale, total);
    static_assert(!Format::kMin || Format::kSubblocks == 2);
    if constexpr (Format::kMin) total = V::fma(V::set1(x.sum[0] + x.sum[1]), min, total);
    return total;
  }
};

// ---- Numbers that a block's scale multiplies, for each row of a subblock or of its halves ----
// R: a vector of rows, or whatever else reads numbers in the form in which sums are multiplied by them.

struct UnsignedBytes {
  static constexpr bool kIntegers = true;
  static constexpr int kRowBytes = 1;
  template <class R>
  TWOFOLD_ALWAYS static auto read(const uint8_t* p, int /*half*/) {
    return R::unsigned_bytes(p);
  }
};
struct SignedBytes {
  static constexpr bool kIntegers = true;
  static constexpr int kRowBytes = 1;
  template <class R>
  TWOFOLD_ALWAYS static auto read(const uint8_t* p, int /*half*/) {
    return R::signed_bytes(p);
  }
};
// Floats of 5 bits of exponent and 3 of mantissa (numbers.h: float_of_8).
struct FloatBytes {
  static constexpr bool kIntegers = false;
  static constexpr int kRowBytes = 1;
  template <class R>
  TWOFOLD_ALWAYS static auto read(const uint8_t* p, int /*half*/) {
    return R::floats_of_8(p);
  }
};
// Two bytes of a row for its subblock, one for each half: low nibbles are the numbers, high ones those of minima.
struct NibblePairs {
  static constexpr bool kIntegers = true;
  static constexpr int kRowBytes = 2;
  template <class R>
  TWOFOLD_ALWAYS static auto read(const uint8_t* p, int half) {
    return R::pair_low(p, half);
  }
};

// Scales of R::kLanes rows, from vector g on.
template <class R, class Format>
TWOFOLD_ALWAYS auto numbers_of(const uint8_t* panel, int subblock, int half, int g) {
  using Sub = typename Format::Sub;
  return Sub::template read<R>(panel + Format::sub_at(subblock, half) + Sub::kRowBytes * R::kLanes * g, half);
}

template <class Format>
inline constexpr bool has_numbers = requires { typename Format::Sub; };
template <class Format>
inline constexpr bool has_float_numbers = requires { requires !Format::Sub::kIntegers; };

// What minima multiply: the scaled sum of a token's subblock, or the sums of its halves.
template <class Format>
inline constexpr bool takes_subblock_sums = Format::kMin && Format::Kind::kSums == 1;
template <class Format>
inline constexpr bool takes_half_sums = Format::kMin && Format::Kind::kSums == 2;

// Weights of 2 or 3 bits whose products with the numbers of their halves fit a byte (3 * 15, 4 * 32).
template <class Format>
inline constexpr bool fits_byte =
    Format::kUnitSubblocks == 4 && Format::Kind::kSums == 2 && !has_table<Format>;

// What a sum of a subblock is multiplied by; where numbers have multiplied it already, only their block's scale.
template <class V, class Format>
TWOFOLD_ALWAYS typename V::F subblock_scale(const uint8_t* block, int subblock, int g) {
  if constexpr (Format::Kind::kSums > 1) {
    return Format::template block_scale<V>(block, g);
  } else {
    return Format::template scale<V>(block, subblock, 0, g);
  }
}

namespace formats {

struct NoMinima {
  static constexpr bool kMin = false;
  template <class V>
  TWOFOLD_ALWAYS static typename V::F min(const uint8_t*, int, int, int) {
    return typename V::F();
  }
  static float source_min(const SourceBlock&, int, int) { return 0.0f; }
};

// Copies a source block's f16 to its row of a panel.
inline bool put_f16(const uint8_t* from, uint8_t* panel, int row) {
  std::memcpy(panel + 2 * row, from, 2);
  return true;
}

// One f16 for each row, copied from byte kAt of its source block.
template <class KindOfScale, int kAt = 0>
struct OneScale : NoMinima {
  using Kind = KindOfScale;
  static constexpr int kHeaderBytes = 2 * kPanelRows, kHalves = 1, kScaleAt = kAt;
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int, int, int g) {
    return V::half(panel + 2 * V::kLanes * g);
  }
  static float source_scale(const uint8_t* block, int, int) { return f16_at(block + kAt); }
  static bool put_scales(const uint8_t* block, uint8_t* panel, int, int row) {
    return put_f16(block + kAt, panel, row);
  }
};

// The same, and an f16 that is added to each weight.
template <class KindOfScale>
struct ScaleAndMin : OneScale<KindOfScale> {
  static constexpr int kHeaderBytes = 4 * kPanelRows, kHalves = 2, kMinAt = 2;
  static constexpr bool kMin = true;
  template <class V>
  TWOFOLD_HD static typename V::F min(const uint8_t* panel, int, int, int g) {
    return V::half(panel + 2 * kPanelRows + 2 * V::kLanes * g);
  }
  static float source_min(const uint8_t* block, int, int) { return f16_at(block + kMinAt); }
  static bool put_scales(const uint8_t* block, uint8_t* panel, int, int row) {
    return put_f16(block, panel, row) & put_f16(block + kMinAt, panel + 2 * kPanelRows, row);
  }
};

// An f16 for each row's block of 256 columns, which multiplies a number of each subblock or half.
//   panel   f16 d[32]; up to kFirst other things; one byte of each row for each subblock or half
// Numbers: kScaleAt, where a source block has the f16, or get_scale(block, f16), which puts it together; kFactor, optional: a
// power of two that multiplies it; source_number(block, i) of subblock or half i.
template <class Numbers, class SubOfScale, class KindOfScale, int kFirst = 64>
struct ScaledNumbers : Numbers, NoMinima {
  using Kind = KindOfScale;
  using Sub = SubOfScale;
  static constexpr int kNumbers = 8 * Kind::kSums, kHeaderBytes = kFirst + kPanelRows * kNumbers, kHalves = 1;

  static bool get_f16(const uint8_t* block, uint8_t* to) {
    if constexpr (requires { Numbers::kScaleAt; }) {
      std::memcpy(to, block + Numbers::kScaleAt, 2);
    } else {
      Numbers::get_scale(block, to);
    }
    return true;
  }
  static float source_scale(const uint8_t* block, int subblock, int half) {
    uint8_t f16[2];
    get_f16(block, f16);
    float d = f16_at(f16);
    if constexpr (requires { Numbers::kFactor; }) d *= Numbers::kFactor;
    return d * static_cast<float>(Numbers::source_number(block, Kind::place(subblock, half)));
  }
  static bool put_scales(const uint8_t* block, uint8_t* panel, int, int row) {
    for (int i = 0; i < kNumbers; ++i)
      panel[kFirst + kPanelRows * i + row] = static_cast<uint8_t>(Numbers::source_number(block, i));
    return get_f16(block, panel + 2 * row);
  }
  TWOFOLD_HD static constexpr int sub_at(int subblock, int half) {
    return kFirst + kPanelRows * Kind::place(subblock, half);
  }
  template <class V>
  TWOFOLD_HD static typename V::F block_scale(const uint8_t* panel, int g) {
    const typename V::F d = V::half(panel + 2 * V::kLanes * g);
    if constexpr (requires { Numbers::kFactor; }) return V::mul(d, V::set1(Numbers::kFactor));
    return d;
  }
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int subblock, int half, int g) {
    return V::mul(block_scale<V>(panel, g), numbers_of<V, ScaledNumbers>(panel, subblock, half, g));
  }
};

}  // namespace formats
}  // namespace twofold::kernels
