// What the quantisers of formats (quantise() of each) share: rounding to f16.
#pragma once
#include <bit>
#include <cstdint>

#include "quantise_fit.h"
#include "twofold/weight_format.h"

namespace twofold::kernels {

// Rounded to nearest even; infinities and what is too large become infinity, NaNs stay NaN.
inline uint16_t f16_of_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {
    // A denormal is a multiple of 2^-24; adding 0.5 leaves exactly these bits, rounded by the addition.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

// A scale as blocks store it: never infinite, so that too large a weight is wrong by itself and does not
// spoil others.
inline uint16_t stored_f16(float value) {
  const uint16_t bits = f16_of_float(value);
  return (bits & 0x7fffu) == 0x7c00u ? static_cast<uint16_t>(bits - 1u) : bits;
}

}  // namespace twofold::kernels
