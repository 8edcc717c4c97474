// Single elements of the weight formats: small floats widened, bytes read from and written to unaligned
// memory.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace twofold::kernels {

template <class T>
T load_as(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void store_as(void* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

inline float float_of_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Exact. Shifted into a float's place the exponent is too small by 112, for denormals too.
inline float float_of_f16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu, sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return std::bit_cast<float>(sign |
                              std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f));
}

inline float f16_at(const void* p) { return float_of_f16(load_as<uint16_t>(p)); }

// The bits of e4m3 in the place of an f16: 2^-8 of its value (a NaN, 0x7f or 0xff, reads as 480).
inline float scaled_float_of_e4m3(uint8_t bits) {
  return float_of_f16(static_cast<uint16_t>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7));
}

inline float float_of_e4m3(uint8_t bits) {
  if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(0x7fc00000u);
  return scaled_float_of_e4m3(bits) * 256.0f;
}

}  // namespace twofold::kernels
