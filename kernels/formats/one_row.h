// A vector of one row (formats/panel.h): how scalar code reads panels.
#pragma once
#include <cmath>

#include "twofold/weight_format.h"

namespace twofold::kernels {

struct OneRow {
  using I = uint32_t;
  using F = float;
  static constexpr int kLanes = 1, kBytes = 4;

  static I load(const uint8_t* p) { return load_as<uint32_t>(p); }
  static I low_nibbles(I v) { return v & 0x0f0f0f0fu; }
  static I high_nibbles(I v) { return v >> 4 & 0x0f0f0f0fu; }
  static I two_bits(I v, int shift) { return v >> shift & 0x03030303u; }
  template <int kBits, int kAt>
  static I with_upper(I v, I plane, int shift) {
    return v | (plane >> shift & 0x01010101u * ((1u << kBits) - 1)) << kAt;
  }
  template <class Codes>
  static I look_up(I codes) {
    I found = 0;
    for (int i = 0; i < 32; i += 8) found |= static_cast<I>(Codes::kTable[codes >> i & 15u]) << i;
    return found;
  }
  static I same(int32_t v) { return static_cast<I>(v); }
  static F set1(float v) { return v; }
  static F to_float(I v) { return static_cast<float>(static_cast<int32_t>(v)); }
  static F half_powers(const uint8_t* p) { return float_of_bits(static_cast<uint32_t>(*p) << 23); }
  static F half(const uint8_t* p) { return f16_at(p); }
  static F unsigned_bytes(const uint8_t* p) { return *p; }
  static F signed_bytes(const uint8_t* p) { return static_cast<int8_t>(*p); }
  static F floats_of_8(const uint8_t* p) { return float_of_8(*p); }
  static F multipliers(const uint8_t* p) {
    const float v = load_as<float>(p);
    return v < 0 ? -1.0f / v : v;
  }
  static F pair_low(const uint8_t* p, int i) { return static_cast<float>(p[i] & 15); }
  static F pair_high(const uint8_t* p, int i) { return static_cast<float>(p[i] >> 4); }
  // Both bytes' high nibbles, in 16 bits each; the sum of the products of two such pairs.
  static I high_pairs(const uint8_t* p) { return p[0] >> 4 | static_cast<I>(p[1] >> 4) << 16; }
  static I pair_products(I a, I b) {
    const auto half = [](I v, int at) { return static_cast<int16_t>(v >> at); };
    return static_cast<I>(half(a, 0) * half(b, 0) + half(a, 16) * half(b, 16));
  }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F negative(F v) { return -v; }
};

// The 32 unsigned weights of a row in a subblock of a panel block.
template <class Format>
void subblock_values(const uint8_t* panel, int row, int subblock, uint8_t* u) {
  for (int slice = 0; slice < 8; ++slice) {
    store_as(u + 4 * slice, Format::template bytes<OneRow>(panel, subblock / Format::kGroupSubblocks,
                                                           subblock % Format::kGroupSubblocks, slice, row));
  }
}

// Bits of element k in a panel block's row, for element formats.
template <class Format>
uint32_t element_bits(const uint8_t* panel, int row, int64_t k) {
  constexpr int kBits = 32 / Format::kSliceColumns;
  const uint8_t* slices = panel + Format::kHeaderBytes;
  const uint32_t word = load_as<uint32_t>(slices + k / Format::kSliceColumns * kSliceBytes + 4 * row);
  return word >> (k % Format::kSliceColumns * kBits) & (0xffffffffu >> (32 - kBits));
}

}  // namespace twofold::kernels
