// Vectors of AVX-512 (F, BW, VL, DQ), for the files of the levels that have it. Anonymous namespace: each of
// those files is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include "levels.h"
#include "simd_kernels.h"

namespace twofold::kernels {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kTokens = 6;
  static constexpr int kPackedTokens = 12, kDirectTokens = 4, kDirectTile = 8;  // packed_float.h
  static constexpr bool kStreamsRows = true;  // one chain of additions keeps up with memory

  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const int8_t* p) { return widen_i8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const Fp8* p) { return widen_fp8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static F load_first(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static F load_first(const int8_t* p, int n) { return widen_i8(_mm_maskz_loadu_epi8(first(n), p)); }
  static F load_first(const Fp8* p, int n) { return widen_fp8(_mm_maskz_loadu_epi8(first(n), p)); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store_first(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

  static F widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

  static F widen_i8(__m128i v) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v)); }
  // Shifted left by 7, an FP8 that kept its sign is the half float of 2^-8 times its value.
  static F widen_fp8(__m128i v) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(v), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbf80u))));
  }

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
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
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

  // The largest magnitude of 32 floats, as bits: a NaN is larger than infinity, and that than any number.
  static int32_t peak_bits32(const float* x) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
    return _mm512_reduce_max_epi32(
        _mm512_max_epi32(low, _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude)));
  }
  // q = x * inverse to nearest even; sums of 16.
  static void quantise32(const float* x, float inverse, int8_t* q, int32_t* sums) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i rounded = _mm512_cvtps_epi32(mul(load(x + 16 * i), set1(inverse)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), _mm512_cvtepi32_epi8(rounded));
      sums[i] = _mm512_reduce_add_epi32(rounded);
    }
  }

  // Steps of packed weights (weight_format.h), 16 rows: one vector per column.
  static void load_bf16_slice(const uint8_t* p, F w[2]) {
    const __m512i both = _mm512_loadu_si512(p);
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    w[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void load_f16_slice(const uint8_t* p, F w[2]) { widen_f16_pairs(_mm512_loadu_si512(p), w[0], w[1]); }
  // Times 2^-8, by way of the first-level cache, as AVX2's.
  static void load_fp8_slice(const uint8_t* p, F w[4]) {
    const __m512i by_column =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i columns =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15),
                                 _mm512_shuffle_epi8(_mm512_loadu_si512(p), by_column));
    const __m512i mask = _mm512_set1_epi16(static_cast<short>(0xbf80u)), none = _mm512_setzero_si512();
    __m512i words[2] = {_mm512_and_si512(_mm512_srai_epi16(_mm512_unpacklo_epi8(none, columns), 1), mask),
                        _mm512_and_si512(_mm512_srai_epi16(_mm512_unpackhi_epi8(none, columns), 1), mask)};
    __asm__("" : "+m"(words));
    const __m256i* halves = reinterpret_cast<const __m256i*>(words);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) w[c] = _mm512_cvtph_ps(_mm256_load_si256(halves + c));
  }
  // The same in registers, for tiles.
  static void widen_fp8_slice(const uint8_t* p, F w[4]) {
    const __m512i four = _mm512_loadu_si512(p), mask = _mm512_set1_epi16(static_cast<short>(0xbf80u));
    widen_f16_pairs(_mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(four, 8), 1), mask), w[0], w[2]);
    widen_f16_pairs(_mm512_and_si512(_mm512_srai_epi16(four, 1), mask), w[1], w[3]);
  }
  static void widen_f16_pairs(__m512i pairs, F& even, F& odd) {
    // The low half of each pair first, then the high ones.
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28,
                                           26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i separate = _mm512_permutexvar_epi16(order, pairs);
    even = _mm512_cvtph_ps(_mm512_castsi512_si256(separate));
    odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(separate, 1));
  }
};

}  // namespace
}  // namespace twofold::kernels
