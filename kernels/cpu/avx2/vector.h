// Vectors of AVX2 with FMA and F16C, for the files of the levels that have them. Anonymous namespace: each of
// those files is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include "levels.h"
#include "simd_kernels.h"

namespace twofold::kernels {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTokens = 2;
  static constexpr int kPackedTokens = 6, kDirectTokens = 2, kDirectTile = 4;  // packed_float.h
  static constexpr bool kStreamsRows =
      false;  // half the bytes per addition: four rows at once keep up with memory

  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const uint16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const int8_t* p) { return widen_i8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static F load(const Fp8* p) { return widen_fp8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  template <class W>
  static F load_first(const W* p, int n) {
    W all[kLanes] = {};
    for (int i = 0; i < n; ++i) all[i] = p[i];
    return load(all);
  }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store_first(float* p, F v, int n) { _mm256_maskstore_ps(p, first(n), v); }

  static F widen(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }

  static F widen_i8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)); }
  // Shifted left by 7, an FP8 that kept its sign is the half float of 2^-8 times its value.
  static F widen_fp8(__m128i v) {
    const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(v), 7);
    return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(static_cast<short>(0xbf80u))));
  }

  static void store_bf16(uint16_t* p, F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static float max_of(F v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static float square_root(float v) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(v))); }

  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  static uint64_t read_all(const void* memory, int64_t num_bytes) {
    const char* p = static_cast<const char*>(memory);
    __m256i sums[8] = {};
    int64_t i = 0;
    for (; i + 256 <= num_bytes; i += 256) {
#pragma GCC unroll 8
      for (int w = 0; w < 8; ++w) {
        prefetch(p + i + 32 * w + 4096);
        sums[w] =
            _mm256_add_epi64(sums[w], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 32 * w)));
      }
    }
    uint64_t words[4], total = 0;
    for (int w = 1; w < 8; ++w) sums[0] = _mm256_add_epi64(sums[0], sums[w]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), sums[0]);
    for (; i < num_bytes; ++i) total += static_cast<unsigned char>(p[i]);
    return total + words[0] + words[1] + words[2] + words[3];
  }

  // out[i] = the sum of all lanes of the i-th argument: lanes 4 apart first, then 2 and 1.
  static void sum4(F a, F b, F c, F d, float* out) {
    const F ac = add(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
    const F bd = add(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
    const F pairs = add(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd));  // a02 b02 a13 b13 | c02 ...
    const F sums = add(pairs, _mm256_permute_ps(pairs, 0x4e));
    _mm_storel_pi(reinterpret_cast<__m64*>(out), _mm256_castps256_ps128(sums));
    _mm_storel_pi(reinterpret_cast<__m64*>(out + 2), _mm256_extractf128_ps(sums, 1));
  }

  static F exp(F v) {
    using namespace exp_constants;
    v = _mm256_min_ps(set1(kHighest),
                      _mm256_max_ps(set1(kLowest), v));  // NaN is the second operand: it passes
    const F n = _mm256_round_ps(mul(v, set1(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = fma(n, set1(-kLn2Low), fma(n, set1(-kLn2High), v));
    F p = set1(kPolynomial[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) p = fma(p, r, set1(kPolynomial[i]));
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(add(fma(p, mul(r, r), r), set1(1.0f)), _mm256_castsi256_ps(exponent));
  }

  // The largest magnitude of 32 floats, as bits: a NaN is larger than infinity, and that than any number.
  static int32_t peak_bits32(const float* x) {
    __m256i peak = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      peak = _mm256_max_epi32(peak, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(peak), _mm256_extracti128_si256(peak, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  // q = x * inverse to nearest even; sums of 16.
  static void quantise32(const float* x, float inverse, int8_t* q, int32_t* sums) {
    for (int i = 0; i < 2; ++i) {
      const __m256i low = _mm256_cvtps_epi32(mul(load(x + 16 * i), set1(inverse)));
      const __m256i high = _mm256_cvtps_epi32(mul(load(x + 16 * i + 8), set1(inverse)));
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
      const __m128i bytes =
          _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), bytes);
      const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
      __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
      four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
      sums[i] = _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
    }
  }

  // Steps of packed weights (weight_format.h), 8 rows: one vector per column.
  static void load_bf16_slice(const uint8_t* p, F w[2]) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    w[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void load_f16_slice(const uint8_t* p, F w[2]) {
    widen_f16_pairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), w[0], w[1]);
  }
  static void widen_fp8_slice(const uint8_t* p, F w[4]) {  // times 2^-8
    const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xbf80u));
    widen_f16_pairs(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(four, 8), 1), mask), w[0], w[2]);
    widen_f16_pairs(_mm256_and_si256(_mm256_srai_epi16(four, 1), mask), w[1], w[3]);
  }
  // The same by way of the first-level cache: a conversion of memory takes no shuffle. (f32 whose exponent is 120 too small,
  // times 2^120, would take the subnormal codes 150 cycles each.)
  static void load_fp8_slice(const uint8_t* p, F w[4]) {
    const __m256i by_column = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8,
                                               12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i columns = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(rows, by_column),
                                                        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xbf80u)), none = _mm256_setzero_si256();
    __m256i words[2] = {_mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(none, columns), 1), mask),
                        _mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(none, columns), 1), mask)};
    __asm__("" : "+m"(words));
    const __m128i* halves = reinterpret_cast<const __m128i*>(words);  // columns 0, 2, 1, 3
    w[0] = _mm256_cvtph_ps(_mm_load_si128(halves));
    w[2] = _mm256_cvtph_ps(_mm_load_si128(halves + 1));
    w[1] = _mm256_cvtph_ps(_mm_load_si128(halves + 2));
    w[3] = _mm256_cvtph_ps(_mm_load_si128(halves + 3));
  }
  static void widen_f16_pairs(__m256i pairs, F& even, F& odd) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5,
                                           8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i separate = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(pairs, order), 0xd8);
    even = _mm256_cvtph_ps(_mm256_castsi256_si128(separate));
    odd = _mm256_cvtph_ps(_mm256_extracti128_si256(separate, 1));
  }
};

}  // namespace
}  // namespace twofold::kernels
