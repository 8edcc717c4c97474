// CUDA's built-in names on the SIMT machine, as far as the project's kernels use them. What is missing here does not
// compile: a new intrinsic is given its meaning first.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simt/kernel_side.h"

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
// As many one-byte nops before the kernel's first instruction as it takes threads: launches count them there
// (launch_bounds.cpp). The compiler knows the number for every instance of a template.
#define __launch_bounds__(...) \
  __attribute__((patchable_function_entry(SIMT_FIRST(__VA_ARGS__, ), SIMT_FIRST(__VA_ARGS__, ))))
#define SIMT_FIRST(first, ...) (first)

#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define blockDim (::simt::block_size())
#define gridDim (::simt::grid_size())

struct CUstream_st;
using cudaStream_t = CUstream_st*;
inline constexpr int cudaErrorInvalidValue = 1;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#ifdef __SANITIZE_THREAD__
// One instruction reads or writes the whole, wherever the compiler would like to read its parts.
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
  uint4() = default;
  uint4(const uint4& other) { ::simt::move(this, &other, 16); }
  uint4& operator=(const uint4& other) {
    ::simt::move(this, &other, 16);
    return *this;
  }
};
struct alignas(8) int2 {
  int x, y;
  int2() = default;
  int2(const int2& other) { ::simt::move(this, &other, 8); }
  int2& operator=(const int2& other) {
    ::simt::move(this, &other, 8);
    return *this;
  }
};
#else  // no access checks
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
#endif

template <class T>
__forceinline__ T __ldcs(const T* address) {
  return *address;
}

template <class T>
__forceinline__ T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
__forceinline__ T max(T a, T b) {
  return a < b ? b : a;
}
__forceinline__ float __expf(float x) { return expf(x); }
__forceinline__ float rsqrtf(float x) { return 1.0f / sqrtf(x); }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__forceinline__ int __popc(uint32_t bits) { return __builtin_popcount(bits); }
__forceinline__ int __float2int_rn(float x) { return int(__builtin_nearbyintf(x)); }
__forceinline__ float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
__forceinline__ uint32_t __float_as_uint(float value) { return __builtin_bit_cast(uint32_t, value); }
__forceinline__ uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return found;
}

__forceinline__ int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
  return sum;
}

namespace simt {
template <class T>
__forceinline__ T exchanged(Meeting how, uint32_t mask, T value, int operand, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  if constexpr (sizeof(T) == 4)
    bits = __builtin_bit_cast(uint32_t, value);
  else
    bits = __builtin_bit_cast(uint64_t, value);
  const uint64_t got = exchange(how, mask, bits, operand, line);
  if constexpr (sizeof(T) == 4)
    return __builtin_bit_cast(T, uint32_t(got));
  else
    return __builtin_bit_cast(T, got);
}
}  // namespace simt

template <class T>
__forceinline__ T __shfl_sync(uint32_t mask, T value, int lane, int line = __builtin_LINE()) {
  return simt::exchanged(simt::Meeting::kShuffleIndex, mask, value, lane, line);
}
template <class T>
__forceinline__ T __shfl_up_sync(uint32_t mask, T value, unsigned by, int line = __builtin_LINE()) {
  return simt::exchanged(simt::Meeting::kShuffleUp, mask, value, int(by), line);
}
template <class T>
__forceinline__ T __shfl_down_sync(uint32_t mask, T value, unsigned by, int line = __builtin_LINE()) {
  return simt::exchanged(simt::Meeting::kShuffleDown, mask, value, int(by), line);
}
template <class T>
__forceinline__ T __shfl_xor_sync(uint32_t mask, T value, int with, int line = __builtin_LINE()) {
  return simt::exchanged(simt::Meeting::kShuffleXor, mask, value, with, line);
}
__forceinline__ uint32_t __ballot_sync(uint32_t mask, int predicate, int line = __builtin_LINE()) {
  return uint32_t(simt::exchange(simt::Meeting::kBallot, mask, predicate != 0, 0, line));
}
__forceinline__ int __any_sync(uint32_t mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
__forceinline__ int __all_sync(uint32_t mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) == mask;
}
__forceinline__ void __syncwarp(uint32_t mask = 0xffffffffu, int line = __builtin_LINE()) {
  simt::warp_barrier(mask, line);
}
__forceinline__ void __syncthreads(int line = __builtin_LINE()) { simt::block_barrier(0, 0, line); }

template <class T>
__forceinline__ T atomicAdd(T* address, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  return T(simt::atomic_add(address, uint64_t(value), sizeof(T), simt::Scope::kDevice));
}
template <class T>
__forceinline__ T atomicAdd_block(T* address, T value) {
  return T(simt::atomic_add(address, uint64_t(value), sizeof(T), simt::Scope::kBlock));
}
__forceinline__ void __threadfence_block() { simt::fence(simt::Scope::kBlock); }
__forceinline__ void __threadfence() { simt::fence(simt::Scope::kDevice); }
__forceinline__ void __threadfence_system() { simt::fence(simt::Scope::kSystem); }
