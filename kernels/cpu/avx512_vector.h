// Vectors of AVX-512 (F, BW, VL, DQ), for the files of the levels that have it. Anonymous namespace: each of
// those files is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include "levels.h"
#include "simd_kernels.h"

namespace twofold::kernels {
namespace {

struct Avx512 {
  template <class W>
  using Product = WidenedProduct<Avx512, W>;

  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kTokens = 6;
  static constexpr bool kStreamsRows = true;  // one chain of additions keeps up with memory

  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static F load_first(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store_first(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

  static F widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

  static void store_bf16(uint16_t* p, F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i kept = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static float max_of(F v) { return _mm512_reduce_max_ps(v); }
  static float square_root(float v) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(v))); }

  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  static uint64_t read_all(const void* memory, int64_t num_bytes) {
    const char* p = static_cast<const char*>(memory);
    __m512i sums[8] = {};
    int64_t i = 0;
    for (; i + 512 <= num_bytes; i += 512) {
#pragma GCC unroll 8
      for (int w = 0; w < 8; ++w) {
        prefetch(p + i + 64 * w + 4096);
        sums[w] = _mm512_add_epi64(sums[w], _mm512_loadu_si512(p + i + 64 * w));
      }
    }
    for (int w = 1; w < 8; ++w) sums[0] = _mm512_add_epi64(sums[0], sums[w]);
    uint64_t words[8], total = 0;
    _mm512_storeu_si512(words, sums[0]);
    for (int w = 0; w < 8; ++w) total += words[w];
    for (; i < num_bytes; ++i) total += static_cast<unsigned char>(p[i]);
    return total;
  }

  // out[i] = the sum of all lanes of the i-th argument: lanes 8 apart first, then 4, 2 and 1.
  static void sum4(F a, F b, F c, F d, float* out) {
    const F ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const F cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    const F quarters = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const F pairs = add(quarters, _mm512_permute_ps(quarters, 0x4e));
    const F sums = add(pairs, _mm512_permute_ps(pairs, 0xb1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
  }

  static F exp(F v) {
    using namespace exp_constants;
    v = _mm512_min_ps(set1(kHighest),
                      _mm512_max_ps(set1(kLowest), v));  // NaN is the second operand: it passes
    const F n = _mm512_roundscale_ps(mul(v, set1(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = fma(n, set1(-kLn2Low), fma(n, set1(-kLn2High), v));
    F p = set1(kPolynomial[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) p = fma(p, r, set1(kPolynomial[i]));
    return _mm512_scalef_ps(add(fma(p, mul(r, r), r), set1(1.0f)), n);
  }
};

}  // namespace
}  // namespace twofold::kernels
