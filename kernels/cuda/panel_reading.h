// How a panel is cut among lanes and read: units of K, 16 bytes of four rows, scales, encoded activations.
//
// Eight lanes read a slice together: lane `quad` takes rows 4 quad ... 4 quad + 3, 16 bytes. K is cut into
// units; which lane takes which unit is launch_shapes.h's.
#pragma once
#include <cstdint>

#include "launch_shapes.h"
#include "number_formats.h"
#include "twofold/packed_kernels.h"
#include "twofold/weight_format.h"

namespace twofold::cuda {

inline constexpr int kRowsOfLane = 4;
inline constexpr int kSlicesOfUnit = 8;  // of plain formats

using kernels::kSliceBytes;
using kernels::load_as;
template <WeightFormat F>
using FormatOf = typename kernels::FormatOf<F>::type;

// Elements without scales: a unit is some slices instead of a part of a panel block.
template <class Format>
inline constexpr bool kIsPlain = Format::kPanelBytes == kSliceBytes;

// A unit of four subblocks is two lanes' units: of the first and of the last 16 columns of each subblock.
template <class Format>
TWOFOLD_HD constexpr int unit_parts() {
  if constexpr (kernels::is_integer<Format>) return Format::kUnitSubblocks == 4 ? 2 : 1;
  return 1;
}

// Columns that a unit covers.
TWOFOLD_HD constexpr int unit_columns(WeightFormat format) {
  return kernels::with_format(format, []<class Format>(Format) {
    if constexpr (kIsPlain<Format>) {
      return Format::kSliceColumns * kSlicesOfUnit;
    } else {
      return Format::kUnitColumns / unit_parts<Format>();
    }
  });
}

// Units of a row of K weights: those of whole panel blocks, since their missing columns are zeros.
TWOFOLD_HD constexpr int num_units(WeightFormat format, int K) {
  return kernels::with_format(format, [K]<class Format>(Format) {
    constexpr int kColumns = kIsPlain<Format> ? 1 : Format::kPanelColumns;
    const int columns = (K + kColumns - 1) / kColumns * kColumns;
    constexpr int kUnit = unit_columns(kernels::kNumberOf<Format>);
    return (columns + kUnit - 1) / kUnit;
  });
}

// Which of the sources of kernels compiles a format: three, so that they compile side by side.
enum class Share : uint8_t { kFloats, kSubblocks, kLargeBlocks };
template <class Format>
inline constexpr Share kShareOf = !kernels::is_integer<Format>   ? Share::kFloats
                                  : Format::kPanelColumns >= 256 ? Share::kLargeBlocks
                                                                 : Share::kSubblocks;

// make(struct of the format) if it is of this share, else nothing.
template <Share kShare, class Runners, class Make>
Runners runners_of_share(WeightFormat format, Make make) {
  Runners found;
  kernels::for_each_format([&]<class Format>(Format) {
    if constexpr (kShareOf<Format> == kShare) {
      if (kernels::kNumberOf<Format> == format) found = make(Format());
    }
  });
  return found;
}

struct Words {
  uint32_t w[4];
};

// 16 bytes of weights, read once: they need not stay in L1.
TWOFOLD_HD Words load_words(const uint8_t* p) {
  Words words;
#ifdef __CUDA_ARCH__
  const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
  words.w[0] = v.x;
  words.w[1] = v.y;
  words.w[2] = v.z;
  words.w[3] = v.w;
#else
  std::memcpy(words.w, p, 16);
#endif
  return words;
}

// Consecutive slices, all asked for before the first is used.
template <int kSlices>
TWOFOLD_HD void load_slices(const uint8_t* first, Words (&out)[kSlices]) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) out[s] = load_words(first + s * kSliceBytes);
}

// Four entries of a table of 16 (Codes::kTable) as a word, less `zero`.
template <class Codes>
constexpr uint32_t table_word(int word, int zero) {
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) packed |= uint32_t(uint8_t(Codes::kTable[4 * word + i] - zero)) << (8 * i);
  return packed;
}

// What the table has for the four lowest nibbles, a byte for each.
template <class Codes, int kLess>
TWOFOLD_HD uint32_t look_up_nibbles(uint32_t nibbles) {
  constexpr uint32_t a = table_word<Codes>(0, kLess), b = table_word<Codes>(1, kLess);
  constexpr uint32_t c = table_word<Codes>(2, kLess), d = table_word<Codes>(3, kLess);
  const uint32_t place = nibbles & 0x7777u;
  const uint32_t half = 0x3210u | (nibbles & 0x8888u) >> 1;  // byte i of the first or the second
  return permute_bytes(permute_bytes(a, b, place), permute_bytes(c, d, place), half);
}

// Rows 4 quad ... 4 quad + 3 as formats read them (twofold/formats/panel.h).
struct Lane {
  static constexpr int kLanes = kRowsOfLane, kBytes = 4 * kRowsOfLane;
  using I = Words;
  struct F {
    float v[kRowsOfLane];
  };

  TWOFOLD_HD static I load(const uint8_t* p) { return load_words(p); }
  TWOFOLD_HD static I low_nibbles(const I& v) {
    I low;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) low.w[r] = v.w[r] & 0x0f0f0f0fu;
    return low;
  }
  TWOFOLD_HD static I high_nibbles(const I& v) {
    I high;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) high.w[r] = (v.w[r] >> 4) & 0x0f0f0f0fu;
    return high;
  }
  TWOFOLD_HD static I two_bits(const I& v, int shift) {
    I two;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) two.w[r] = (v.w[r] >> shift) & 0x03030303u;
    return two;
  }
  template <int kBits, int kAt>
  TWOFOLD_HD static I with_upper(I v, const I& plane, int shift) {
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r)
      v.w[r] |= ((plane.w[r] >> shift) & 0x01010101u * ((1u << kBits) - 1)) << kAt;
    return v;
  }
  template <class Codes, int kLess = 0>
  TWOFOLD_HD static I look_up(const I& codes) {
    I found;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      const uint32_t pairs = codes.w[r] | codes.w[r] >> 4;  // nibbles 0 | 1 and 2 | 3 in bytes 0 and 2
      found.w[r] = look_up_nibbles<Codes, kLess>(permute_bytes(pairs, 0, 0x4420));
    }
    return found;
  }
  // Low and high nibbles of packed codes at once, signed.
  template <class Format>
  TWOFOLD_HD static void look_up_signed(const I& codes, I& low, I& high) {
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      const uint32_t first = look_up_nibbles<Format, Format::kZero>(codes.w[r]);
      const uint32_t last = look_up_nibbles<Format, Format::kZero>(codes.w[r] >> 16);
      low.w[r] = permute_bytes(first, last, 0x6420);
      high.w[r] = permute_bytes(first, last, 0x7531);
    }
  }
  TWOFOLD_HD static F half_powers(const uint8_t* p) {
    const uint32_t four = load_as<uint32_t>(p);
    return {{float_of_bits((four & 0xffu) << 23), float_of_bits((four & 0xff00u) << 15),
             float_of_bits((four & 0xff0000u) << 7), float_of_bits(four >> 24 << 23)}};
  }
  TWOFOLD_HD static F half(const uint8_t* p) {
    const uint32_t low = load_as<uint32_t>(p), high = load_as<uint32_t>(p + 4);
    return {{kernels::float_of_f16(low & 0xffffu), kernels::float_of_f16(low >> 16),
             kernels::float_of_f16(high & 0xffffu), kernels::float_of_f16(high >> 16)}};
  }
  TWOFOLD_HD static F unsigned_bytes(const uint8_t* p) {
    const uint32_t four = load_as<uint32_t>(p);
    return {
        {float(four & 0xffu), float((four >> 8) & 0xffu), float((four >> 16) & 0xffu), float(four >> 24)}};
  }
  TWOFOLD_HD static F signed_bytes(const uint8_t* p) {
    const uint32_t four = load_as<uint32_t>(p);
    return {{float(int8_t(four)), float(int8_t(four >> 8)), float(int8_t(four >> 16)),
             float(int8_t(four >> 24))}};
  }
  TWOFOLD_HD static F floats_of_8(const uint8_t* p) {
    const uint32_t four = load_as<uint32_t>(p);
    return {{kernels::float_of_8(four & 0xffu), kernels::float_of_8((four >> 8) & 0xffu),
             kernels::float_of_8((four >> 16) & 0xffu), kernels::float_of_8(four >> 24)}};
  }
  TWOFOLD_HD static F multipliers(const uint8_t* p) {
    const Words four = load_words(p);
    F found;
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
      const float v = float_of_bits(four.w[r]);
      found.v[r] = v < 0 ? -1.0f / v : v;
    }
    return found;
  }
  TWOFOLD_HD static F pair_low(const uint8_t* p, int i) {
    const uint32_t first = load_as<uint32_t>(p) >> (8 * i), last = load_as<uint32_t>(p + 4) >> (8 * i);
    return {{float(first & 15u), float((first >> 16) & 15u), float(last & 15u), float((last >> 16) & 15u)}};
  }
  TWOFOLD_HD static F pair_high(const uint8_t* p, int i) {
    const uint32_t first = load_as<uint32_t>(p) >> (8 * i + 4),
                   last = load_as<uint32_t>(p + 4) >> (8 * i + 4);
    return {{float(first & 15u), float((first >> 16) & 15u), float(last & 15u), float((last >> 16) & 15u)}};
  }
  TWOFOLD_HD static F set1(float v) { return {{v, v, v, v}}; }
  TWOFOLD_HD static F mul(F a, const F& b) {
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) a.v[r] *= b.v[r];
    return a;
  }
  TWOFOLD_HD static F negative(F v) {
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) v.v[r] = -v.v[r];
    return v;
  }
};

// Weight c of a row's slice of floats.
template <class Format>
TWOFOLD_HD float weight_of(uint32_t word, int c) {
  constexpr int kBits = 32 / Format::kSliceColumns;
  return Format::weight((word >> (kBits * c)) & (0xffffffffu >> (32 - kBits)));
}

// An encoded q8 row: i8 q[P], f32 scale[P / 32], i32 sum16[P / 16].
struct Q8Row {
  const uint8_t* row;
  int P;

  TWOFOLD_HD uint32_t word(int column) const { return load_as<uint32_t>(row + column); }
  TWOFOLD_HD float scale(int column) const { return load_as<float>(row + P + column / 32 * 4); }
  TWOFOLD_HD int32_t sum16(int column) const { return load_as<int32_t>(row + P + P / 8 + column / 16 * 4); }
  TWOFOLD_HD int32_t sum32(int column) const { return sum16(column) + sum16(column + 16); }
};

}  // namespace twofold::cuda
