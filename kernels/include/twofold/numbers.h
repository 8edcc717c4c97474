// Small floats as bits, the same on a device and on the CPU, and numbers at any address.
#pragma once
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace twofold::kernels {

template <class T>
TWOFOLD_HD T load_as(const void* p) {
#ifdef __CUDA_ARCH__
  return *static_cast<const T*>(p);
#else
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
#endif
}

template <class T>
inline void store_as(void* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

TWOFOLD_HD float float_of_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

TWOFOLD_HD uint32_t bits_of_float(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

TWOFOLD_HD float float_of_bf16(uint32_t bits) { return float_of_bits(bits << 16); }

// To nearest, ties to even; NaN stays NaN.
TWOFOLD_HD uint16_t bf16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact, subnormals included.
TWOFOLD_HD float float_of_f16(uint32_t half) {
#ifdef __CUDA_ARCH__
  // An instruction: kernels/cuda/gpu/machine.cuh has it.
  __host__ __device__ float f16_instruction(uint16_t);
  return f16_instruction(static_cast<uint16_t>(half));
#else
  // Exponent and mantissa moved to a float's place are 2^-112 of the value; then infinity and NaN.
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const float scaled = float_of_bits(magnitude) * 0x1p112f;
  uint32_t bits = bits_of_float(scaled);
  if ((half & 0x7c00u) == 0x7c00u) bits = 0x7f800000u | magnitude;
  return float_of_bits(bits | (half & 0x8000u) << 16);
#endif
}

// Half of E8M0's 2^(byte - 127), exactly.
TWOFOLD_HD float half_of_e8m0(uint32_t byte) {
  return float_of_bits(byte < 2 ? 0x00200000u << byte : (byte - 1) << 23);
}

// 5 bits of exponent and 3 of mantissa in a float's place: 2^(exponent - 127) * (1 + mantissa / 8). 0 is zero; of an
// exponent of 0 there is nothing else.
TWOFOLD_HD float float_of_8(uint32_t byte) { return float_of_bits(byte << 20); }

inline float f16_at(const void* p) { return float_of_f16(load_as<uint16_t>(p)); }

// e4m3 without infinities. 0x7f and 0xff, its NaNs, are read as 480: kernels never meet them (loading refuses
// them).
TWOFOLD_HD float float_of_e4m3(uint32_t byte) {
  const uint32_t bits = ((byte & 0x80u) << 24) | ((byte & 0x7fu) << 20);
  return float_of_bits(bits) * 0x1p120f;  // subnormals come out right too
}

}  // namespace twofold::kernels
