// Small numbers as bits, the same on the device and in the CPU tests: f16, bf16, e4m3, four bytes at a time.
#pragma once
#include <cstdint>
#include <cstring>

#include "host_device.h"
#include "twofold/packed_kernels.h"
#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace twofold::cuda {

using kernels::kSmallestQ8;

inline constexpr float kLargestFloat = 3.4028235e38f;

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

TWOFOLD_HD float bf16_low(uint32_t pair) { return float_of_bits(pair << 16); }
TWOFOLD_HD float bf16_high(uint32_t pair) { return float_of_bits(pair & 0xffff0000u); }

// To nearest, ties to even; NaN stays NaN.
TWOFOLD_HD uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TWOFOLD_HD uint32_t bf16_pair(float low, float high) {
  return uint32_t(to_bf16(low)) | (uint32_t(to_bf16(high)) << 16);
}

TWOFOLD_HD float f16_to_float(uint32_t half) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(uint16_t(half)));
#else
  // Exponent and mantissa moved to float's place are 2^-112 of the value, subnormals included; then infinity
  // and NaN.
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const float scaled = float_of_bits(magnitude) * float_of_bits(0x77800000u);  // 2^112
  uint32_t bits = bits_of_float(scaled);
  if ((half & 0x7c00u) == 0x7c00u) bits = 0x7f800000u | magnitude;
  return float_of_bits(bits | ((half & 0x8000u) << 16));
#endif
}

// e4m3 without infinities. 0x7f and 0xff, its NaNs, are read as 480: no quantiser writes them.
TWOFOLD_HD float e4m3_to_float(uint32_t byte) {
  const uint32_t bits = ((byte & 0x80u) << 24) | ((byte & 0x7fu) << 20);
  return float_of_bits(bits) * float_of_bits(0x7b800000u);  // 2^120; subnormals come out right too
}

// sum + the four products of signed bytes.
TWOFOLD_HD int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(int(a), int(b), sum);
#else
  for (int i = 0; i < 4; ++i) sum += int32_t(int8_t(a >> (8 * i))) * int32_t(int8_t(b >> (8 * i)));
  return sum;
#endif
}

// Bits 0-3 of `bits` to bit `at` of bytes 0-3.
TWOFOLD_HD uint32_t spread_bits(uint32_t bits, int at) {
  return (((bits & 0xfu) * 0x00204081u) & 0x01010101u) << at;
}

// x as one of 255 steps of `largest` (its run's greatest magnitude); a run of zeros, subnormals or without a
// finite maximum becomes zeros.
TWOFOLD_HD int q8_of(float x, float largest) {
  if (!(largest >= kSmallestQ8 && largest <= kLargestFloat)) return 0;
#ifdef __CUDA_ARCH__
  return __float2int_rn(__fmul_rn(x, __fdiv_rn(127.0f, largest)));
#else
  return int(__builtin_nearbyintf(x * (127.0f / largest)));
#endif
}

TWOFOLD_HD float q8_scale(float largest) {
  if (!(largest <= kLargestFloat)) return float_of_bits(0x7fc00000u);
#ifdef __CUDA_ARCH__
  return largest < kSmallestQ8 ? 0.0f : __fdiv_rn(largest, 127.0f);
#else
  return largest < kSmallestQ8 ? 0.0f : largest / 127.0f;
#endif
}

TWOFOLD_HD float fused(float a, float b, float sum) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, sum);
#else
  return __builtin_fmaf(a, b, sum);
#endif
}

}  // namespace twofold::cuda
