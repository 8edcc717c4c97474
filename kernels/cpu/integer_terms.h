// Encoded activation rows, and what a tile of the integer products needs to know of a part (256 columns, 8 subblocks) of one
// besides its integers. AVX2, for all levels that have it. Anonymous namespace: each file that includes this
// is compiled with flags of its own and must not share code with another.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "twofold/packed_kernels.h"

namespace twofold::kernels {
namespace {

// Encoded activation rows, from one of their subblocks on.
struct Q8Rows {
  const int8_t* q;
  const float* scale;
  const int32_t* sum16;
  int64_t row_bytes;

  static Q8Rows of(const void* x, int64_t row_bytes, int K) {
    const int8_t* q = static_cast<const int8_t*>(x);
    const int64_t P = activation_columns(K);
    return {q, reinterpret_cast<const float*>(q + P), reinterpret_cast<const int32_t*>(q + P + P / 8),
            row_bytes};
  }
  Q8Rows from(int row, int64_t subblock) const {
    const int64_t bytes = row * row_bytes;
    return {q + bytes + 32 * subblock, at(scale, bytes) + subblock, at(sum16, bytes) + 2 * subblock,
            row_bytes};
  }
  template <class E>
  static const E* at(const E* p, int64_t bytes) {
    return reinterpret_cast<const E*>(reinterpret_cast<const char*>(p) + bytes);
  }
};

// A part of a panel, perhaps unpacked, and what to bring into the cache meanwhile: `lines` for every subblock.
struct PanelPart {
  const uint8_t* block;
  int num_blocks;
  uint8_t* bytes;
  const char* next;
  int lines;
};

struct SubblockTerms {
  static __m256i load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(int32_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  template <int kZero>
  static __m256i times_minus(__m256i v) {
    static_assert((kZero & (kZero - 1)) == 0, "a shift");
    if constexpr (kZero == 0) return _mm256_setzero_si256();
    return _mm256_slli_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), v), __builtin_ctz(kZero | 1 << 30));
  }

  // scales[8] and, if kMin, sums[8] = sum of the subblock * scale.
  template <bool kMin>
  static void of_scales(const int32_t* sum16, const float* scale, float* scales, float* sums) {
    const __m256 s = _mm256_loadu_ps(scale);
    _mm256_storeu_ps(scales, s);
    if constexpr (kMin) _mm256_storeu_ps(sums, _mm256_mul_ps(_mm256_cvtepi32_ps(of_pairs(sum16)), s));
  }

  // pairs[8]: the sums of a subblock's halves, of 16 bits each.
  static void of_halves(const int32_t* sum16, int32_t* pairs) {
    store(pairs, _mm256_permute4x64_epi64(_mm256_packs_epi32(load(sum16), load(sum16 + 8)), 0xd8));
  }

  // What integer sums begin with. zero[8] = -kZero * sum of the subblock, or zero[16] of its halves.
  template <int kZero, bool kHalves>
  static void of_zeros(const int32_t* sum16, int32_t* zero) {
    if constexpr (kHalves) {
      store(zero, times_minus<kZero>(load(sum16)));
      store(zero + 8, times_minus<kZero>(load(sum16 + 8)));
    } else {
      store(zero, times_minus<kZero>(of_pairs(sum16)));
    }
  }

  // The same for sums in 16 bits, of which a row has two: of columns 0 and 1 (mod 4) in the lower half of a word, of
  // columns 2 and 3 in the upper one.
  template <int kZero, bool kHalves>
  static void of_lanes(const int8_t* q, int32_t* zero) {
    static_assert(kZero <= 32, "beyond 16 bits");
    for (int subblock = 0; subblock < 8; ++subblock) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 32 * subblock));
      __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(kZero), x);
      sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4e));
      sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xb1));
      const __m128i low = _mm256_castsi256_si128(sums), high = _mm256_extracti128_si256(sums, 1);
      const __m128i none = _mm_setzero_si128();
      if constexpr (kHalves) {
        zero[2 * subblock] = _mm_cvtsi128_si32(_mm_sub_epi16(none, low));
        zero[2 * subblock + 1] = _mm_cvtsi128_si32(_mm_sub_epi16(none, high));
      } else {
        zero[subblock] = _mm_cvtsi128_si32(_mm_sub_epi16(none, _mm_add_epi16(low, high)));
      }
    }
  }

  // To every kPieces-th of zero[kPieces * 8].
  static void add(int32_t v, int pieces, int32_t* zero) {
    for (int i = 0; i < 8; ++i) zero[pieces * i] += v;
  }

 private:
  static __m256i of_pairs(const int32_t* sum16) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(load(sum16), load(sum16 + 8)), 0xd8);
  }
};

}  // namespace
}  // namespace twofold::kernels
