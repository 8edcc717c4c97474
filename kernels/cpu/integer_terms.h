// What a tile of the integer products needs to know of a part (256 columns, 8 runs) of an activation row
// besides its integers. AVX2, for all levels that have it. Anonymous namespace: each file that includes this
// is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace twofold::kernels {
namespace {

struct RunTerms {
  static __m256i load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(int32_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  template <int kZero>
  static __m256i times_minus(__m256i v) {
    static_assert((kZero & (kZero - 1)) == 0, "a shift");
    if constexpr (kZero == 0) return _mm256_setzero_si256();
    return _mm256_slli_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), v), __builtin_ctz(kZero | 1 << 30));
  }

  // zero[8] = -kZero * sum of the run; sums[8] = sum of the run * scale, if kMin.
  template <int kZero, bool kMin>
  static void of_runs(const int32_t* sum16, const float* scale, int32_t* zero, float* scales, float* sums) {
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_hadd_epi32(load(sum16), load(sum16 + 8)), 0xd8);
    const __m256 s = _mm256_loadu_ps(scale);
    store(zero, times_minus<kZero>(pairs));
    _mm256_storeu_ps(scales, s);
    if constexpr (kMin) _mm256_storeu_ps(sums, _mm256_mul_ps(_mm256_cvtepi32_ps(pairs), s));
  }

  // zero[16] = -kZero * sum of half a run.
  template <int kZero>
  static void of_halves(const int32_t* sum16, const float* scale, int32_t* zero, float* scales) {
    store(zero, times_minus<kZero>(load(sum16)));
    store(zero + 8, times_minus<kZero>(load(sum16 + 8)));
    _mm256_storeu_ps(scales, _mm256_loadu_ps(scale));
  }
};

}  // namespace
}  // namespace twofold::kernels
