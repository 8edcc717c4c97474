// What device functions do with small numbers, the same on the device and in the CPU tests: pairs of bf16,
// bytes four at a time, q8 activations.
#pragma once
#include <cstdint>

#include "twofold/numbers.h"
#include "twofold/packed_kernels.h"

namespace twofold::cuda {

using kernels::bf16_of_float;
using kernels::bits_of_float;
using kernels::float_of_bits;
using kernels::kSmallestQ8;

inline constexpr float kLargestFloat = 3.4028235e38f;

TWOFOLD_HD float bf16_low(uint32_t pair) { return float_of_bits(pair << 16); }
TWOFOLD_HD float bf16_high(uint32_t pair) { return float_of_bits(pair & 0xffff0000u); }

TWOFOLD_HD uint32_t bf16_pair(float low, float high) {
  return uint32_t(bf16_of_float(low)) | (uint32_t(bf16_of_float(high)) << 16);
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

// Selects from the eight bytes of a followed by b: the selector's nibbles (0 to 7, lowest first) are byte indices.
TWOFOLD_HD uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return found;
#endif
}

// x as one of 255 steps of `largest` (its subblock's greatest magnitude); a subblock of zeros, subnormals or without a
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

// For kernels::gated (expert.h): an instruction and a product on the device.
struct FastExp {
  TWOFOLD_HD float operator()(float v) const {
#ifdef __CUDA_ARCH__
    return __expf(v);
#else
    return __builtin_expf(v);
#endif
  }
};

TWOFOLD_HD float fused(float a, float b, float sum) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, sum);
#else
  return __builtin_fmaf(a, b, sum);
#endif
}

}  // namespace twofold::cuda
