// Vectors of 8 rows for the integer products of the levels without AVX-512. Anonymous namespace: each file
// that includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include "integer_products.h"

namespace twofold::kernels {
namespace {

// Both bytes of each of 8 rows: their nibbles.
struct Avx2Pairs {
  static __m256 pair_low(const uint8_t* p, int i) {
    const __m256i rows = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(rows, 8 * i), _mm256_set1_epi32(15)));
  }
  static __m256 pair_high(const uint8_t* p, int i) {
    const __m256i rows = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(rows, 8 * i + 4), _mm256_set1_epi32(15)));
  }
  // The high nibbles of both, 16 bits each.
  static __m256i high_pairs(const uint8_t* p) {
    return _mm256_srli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 4);
  }
  static __m256i low_pairs(const uint8_t* p) {
    return _mm256_and_si256(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                            _mm256_set1_epi16(15));
  }
  static __m256i pair_products(__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); }
};

struct Avx2Integer : Avx2Pairs {
  using I = __m256i;
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kBytes = 32;

  static I load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(uint8_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static I low_nibbles(I v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static I high_nibbles(I v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
  static I two_bits(I v, int shift) {
    return _mm256_and_si256(shift > 0 ? _mm256_srli_epi16(v, shift) : v, _mm256_set1_epi8(3));
  }
  template <int kBits, int kAt>
  static I with_upper(I v, I plane, int shift) {
    const I there = shift == kAt  ? plane
                    : shift > kAt ? _mm256_srli_epi16(plane, shift - kAt)
                                  : _mm256_slli_epi16(plane, kAt - shift);
    return _mm256_or_si256(v, _mm256_and_si256(there, _mm256_set1_epi8(((1 << kBits) - 1) << kAt)));
  }
  // As Avx512Vnni's.
  template <int kRight>
  static I moved(I v) {
    if constexpr (kRight > 0) return _mm256_srli_epi16(v, kRight);
    if constexpr (kRight < 0) return _mm256_slli_epi16(v, -kRight);
    return v;
  }
  template <int kBits>
  static I bits(I v) {
    return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(kBits)));
  }
  template <int kBits>
  static I with_bits(I v, I plane) {
    return _mm256_or_si256(v, bits<kBits>(plane));
  }
  template <int kRight>
  static I joined(I low, I high) {
    if constexpr (kRight > 0) low = _mm256_srli_epi32(low, kRight);
    return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16 - kRight), 0xaa);
  }
  template <class Codes>
  static I look_up(I codes) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Codes::kTable));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
  }
  static I same(int32_t v) { return _mm256_set1_epi32(v); }
  static I broadcast(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static F as_float(I v) { return _mm256_castsi256_ps(v); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F negative(F v) { return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f)); }
  static F half(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F half_powers(const uint8_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 23));
  }
  static F unsigned_bytes(const uint8_t* p) {
    return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F signed_bytes(const uint8_t* p) {
    return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static I twice(F v) {
    const I whole = _mm256_cvtps_epi32(v);
    return _mm256_blend_epi16(whole, _mm256_slli_epi32(whole, 16), 0xaa);
  }
  static I same_words(int v) { return _mm256_set1_epi16(static_cast<short>(v)); }
  static I times_plus(I u, I factor, I v) { return _mm256_add_epi16(_mm256_mullo_epi16(u, factor), v); }
  static F minus_product(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }

  static F floats_of_8(const uint8_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 20));
  }
  static F multipliers(const uint8_t* p) {
    const F v = _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    return _mm256_blendv_ps(v, _mm256_div_ps(_mm256_set1_ps(-1.0F), v), v);
  }

  // As Avx512Vnni's.
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

  static void load_rows(const float* p, int rows, float* out) {
    for (int r = 0; r < rows; ++r) out[r] = p[r];
    for (int r = rows; r < kPanelRows; ++r) out[r] = 0.0f;
  }
  static void store_rows(const float* from, int rows, float* p) {
    for (int r = 0; r < rows; ++r) p[r] = from[r];
  }
};

}  // namespace
}  // namespace twofold::kernels
