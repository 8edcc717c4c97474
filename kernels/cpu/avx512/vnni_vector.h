// Vectors of AVX-512 with VNNI for integer_products.h. A tile is a whole panel (two vectors of 16 rows) x up
// to 8 tokens: 16 integer and 16 float sums, some of which wait on the stack; 1.04 to 1.07 times as fast as 6 tokens with
// 12 and 12. Halves' sums leave room for 6. Anonymous namespace: each file that includes this
// is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "avx512/rows.h"
#include "sums_of_32.h"

namespace twofold::kernels {
namespace {

// Both bytes of each of 16 rows: their nibbles.
struct Avx512Pairs {
  static __m512 pair_low(const uint8_t* p, int i) {
    const __m512i rows = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_cvtepi32_ps(
        _mm512_and_si512(_mm512_srli_epi32(rows, static_cast<unsigned>(8 * i)), _mm512_set1_epi32(15)));
  }
  static __m512 pair_high(const uint8_t* p, int i) {
    const __m512i rows = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_cvtepi32_ps(
        _mm512_and_si512(_mm512_srli_epi32(rows, static_cast<unsigned>(8 * i + 4)), _mm512_set1_epi32(15)));
  }
  // The high nibbles of both, 16 bits each.
  static __m512i high_pairs(const uint8_t* p) {
    return _mm512_srli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
                             4);
  }
  static __m512i low_pairs(const uint8_t* p) {
    return _mm512_and_si512(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
                            _mm512_set1_epi16(15));
  }
  static __m512i pair_products(__m512i a, __m512i b) { return _mm512_madd_epi16(a, b); }
};

struct Avx512Vnni : Avx512Rows, Avx512Pairs {
  using I = __m512i;
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kBytes = 64;

  template <int kBits>
  struct Dot : SumsOf32<Avx512Vnni> {
    static constexpr int tokens(int pieces) { return pieces == 2 ? 6 : 8; }
    // Bytes that are multiplied as they lie come out of memory more slowly with 8 (Q8_0, 8 and 16 tokens: 0.92).
    static constexpr int few_tokens(int codes) { return codes > 1 ? 8 : 6; }
    static constexpr int vectors(int /*tokens*/, int /*pieces*/) { return 2; }
    static constexpr int held(int pieces) {
      return pieces == 2 ? 4 : 8;
    }  // tokens whose float sums the compiler places
    static constexpr int unpack_tiles(int codes) { return codes > 1 ? 2 : 0; }
    static void add(Sum& sum, Weights w, I values) { sum = _mm512_dpbusd_epi32(sum, w, values); }
  };

  // One vector at once for the third bits, 1.07 to 1.1 times as fast as two.
  template <class Format>
  struct Four : FourOf32<Avx512Vnni, Format, (Format::kPlanes > 0 ? 1 : 2)> {};

  // For channel_products.h.
  template <int kBits>
  struct ChannelDot : ChannelOf32<Avx512Vnni> {
    static constexpr int kTokens = 8;
    static constexpr int vectors(int /*tokens*/) { return 2; }
    static void add(I& sum, I w, I values) { sum = _mm512_dpbusd_epi32(sum, w, values); }
  };

  static I load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void store(uint8_t* p, I v) { _mm512_storeu_si512(p, v); }
  static I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static I high_nibbles(I v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
  static I two_bits(I v, int shift) {
    return _mm512_and_si512(shift > 0 ? _mm512_srli_epi16(v, static_cast<unsigned>(shift)) : v,
                            _mm512_set1_epi8(3));
  }
  template <int kBits, int kAt>
  static I with_upper(I v, I plane, int shift) {
    const I there = shift == kAt  ? plane
                    : shift > kAt ? _mm512_srli_epi16(plane, static_cast<unsigned>(shift - kAt))
                                  : _mm512_slli_epi16(plane, static_cast<unsigned>(kAt - shift));
    const I mask = _mm512_set1_epi8(((1 << kBits) - 1) << kAt);
    return _mm512_ternarylogic_epi32(v, there, mask, 0xf8);  // v | (there & mask)
  }
  // For FourOf32: shifted to the right; some bits of each byte, and added to those of v; of each row's two sums, shifted
  // by `right` to the right, the lower 16 bits side by side.
  template <int kRight>
  static I moved(I v) {
    if constexpr (kRight < 0) return _mm512_slli_epi16(v, -kRight);
    return _mm512_srli_epi16(v, kRight);
  }
  template <int kBits>
  static I bits(I v) {
    return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(kBits)));
  }
  template <int kBits>
  static I with_bits(I v, I plane) {
    return _mm512_ternarylogic_epi32(v, plane, _mm512_set1_epi8(static_cast<char>(kBits)),
                                     0xf8);  // v | (plane & kBits)
  }
  template <int kRight>
  static I joined(I low, I high) {
    if constexpr (kRight > 0) low = _mm512_srli_epi32(low, kRight);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16 - kRight));
  }
  template <class Codes>
  static I look_up(I codes) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Codes::kTable));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
  }
  static I same(int32_t v) { return _mm512_set1_epi32(v); }
  static I broadcast(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    I v = _mm512_set1_epi32(four);
    __asm__("" : "+v"(v));  // loaded once, not once for each vector of weights
    return v;
  }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static F as_float(I v) { return _mm512_castsi512_ps(v); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F negative(F v) { return _mm512_xor_ps(v, _mm512_set1_ps(-0.0f)); }
  static F half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F half_powers(const uint8_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23));
  }
  static F unsigned_bytes(const uint8_t* p) {
    return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F signed_bytes(const uint8_t* p) {
    return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // For folded_block.h: whole numbers twice in 16 bits each; in 16 bits the lower ones of u * factor + v; of -ab + c.
  static I twice(F v) {
    const I whole = _mm512_cvtps_epi32(v);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, whole, _mm512_slli_epi32(whole, 16));
  }
  static I same_words(int v) { return _mm512_set1_epi16(static_cast<short>(v)); }
  static I times_plus(I u, I factor, I v) { return _mm512_add_epi16(_mm512_mullo_epi16(u, factor), v); }
  static I other_sign(I v) { return _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(128))); }
  static F minus_product(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }

  static F floats_of_8(const uint8_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 20));
  }
  static F multipliers(const uint8_t* p) {
    const F v = _mm512_loadu_ps(p), none = _mm512_setzero_ps();
    return _mm512_mask_div_ps(v, _mm512_cmp_ps_mask(v, none, _CMP_LT_OQ), _mm512_set1_ps(-1.0F), v);
  }

  // Into the second-level cache: the 24 line fills of Zen 4's first level carry half of what the memory gives (one token
  // of Q4_K 0.226 -> 0.154 ms).
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
};

}  // namespace
}  // namespace twofold::kernels
