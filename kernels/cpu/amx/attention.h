// Attention over a block of positions by tiles (TileAttention in kernels.h), written over T (amx/tiles.h).
//
// Scores are computed transposed: keys are the left operand as they lie in the cache, a row per position, and queries,
// which are few, are laid out as the right one. Values are the right operand of the second product, pairs of
// positions interleaved. A sum's order is that of its 32 columns, or 32 positions from the block's beginning.
#pragma once
#include "amx/tiles.h"
#include "avx512/vector.h"

namespace twofold::kernels {
namespace {

template <class T>
struct AmxAttention {
  using V = Avx512;
  static constexpr int kRows = 16;  // in a tile
  static constexpr int kMostColumns = TileAttention::kMostColumns;

  static int padded(int D) { return (D + 31) / 32 * 32; }

  // 16 x 16 elements of 4 bytes change rows and columns.
  static void transpose(__m512i v[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
      v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
      v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
      v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }

  static void configure() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, kRows, 64);
    T::configure(&config);
  }

  // 16 elements, or the last of them; zeros behind. All three types are exact in bfloat16: the lower halves are zero.
  template <class W>
  static __m512i bits(const W* p, int left) {
    return _mm512_castps_si512(left >= 16 ? V::load(p) : V::load_first(p, left));
  }

  template <class W>
  static void put_key_rows(const W* rows, int count, int D, uint16_t* to) {
    const int width = padded(D);
    for (int j = 0; j < count; ++j, rows += D, to += width) {
      int d = 0;
      for (; d < D; d += 16) {
        const __m512i high = _mm512_srli_epi32(bits(rows + d, D - d), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), _mm512_cvtepi32_epi16(high));
      }
      if (d < width) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), _mm256_setzero_si256());
    }
  }

  template <class W>
  static void put_value_rows(const W* rows, int first, int count, int D, uint16_t* block) {
    const int width = padded(D), end = first + count;
    for (int j = first; j < end;) {
      uint16_t* to = block + static_cast<int64_t>(j / 2) * width * 2;
      const W* row = rows + static_cast<int64_t>(j - first) * D;
      const bool odd = j % 2 != 0, both = !odd && j + 1 < end;
      for (int d = 0; d < width; d += 16) {
        const __m512i one = d < D ? bits(row + d, D - d) : _mm512_setzero_si512();
        if (both) {
          const __m512i two = d < D ? bits(row + D + d, D - d) : _mm512_setzero_si512();
          _mm512_storeu_si512(to + 2 * d, _mm512_or_si512(_mm512_srli_epi32(one, 16), two));
        } else if (odd) {
          _mm512_mask_storeu_epi16(to + 2 * d, 0xaaaaaaaau, one);
        } else {
          _mm512_mask_storeu_epi16(to + 2 * d, 0x55555555u, _mm512_srli_epi32(one, 16));
        }
      }
      j += both ? 2 : 1;
    }
  }

  static void put_keys(DType dtype, const void* rows, int first, int count, int D, void* block) {
    uint16_t* to = static_cast<uint16_t*>(block) + static_cast<int64_t>(first) * padded(D);
    if (dtype == DType::kBF16) put_key_rows(static_cast<const uint16_t*>(rows), count, D, to);
    if (dtype == DType::kI8) put_key_rows(static_cast<const int8_t*>(rows), count, D, to);
    if (dtype == DType::kFP8) put_key_rows(static_cast<const Fp8*>(rows), count, D, to);
  }

  static void put_values(DType dtype, const void* rows, int first, int count, int D, void* block) {
    uint16_t* to = static_cast<uint16_t*>(block);
    if (dtype == DType::kBF16) put_value_rows(static_cast<const uint16_t*>(rows), first, count, D, to);
    if (dtype == DType::kI8) put_value_rows(static_cast<const int8_t*>(rows), first, count, D, to);
    if (dtype == DType::kFP8) put_value_rows(static_cast<const Fp8*>(rows), first, count, D, to);
  }

  // Queries of up to 16 rows as a right operand: [pairs of columns][row][2].
  static void lay_out(const float* q, int M, int D, __m512i* to) {
    const int width = padded(D);
    alignas(64) uint16_t rows[kRows][32];
    for (int d = 0; d < width; d += 32, to += 16) {
      for (int m = 0; m < kRows; ++m) {
        for (int i = 0; i < 32; i += 16) {
          const int left = m < M ? D - d - i : 0;
          const float* from = q + static_cast<int64_t>(m) * D + d + i;
          V::store_bf16(rows[m] + i, left >= 16 ? V::load(from)
                                     : left > 0 ? V::load_first(from, left)
                                                : V::zero());
        }
      }
      for (int m = 0; m < kRows; ++m) to[m] = _mm512_load_si512(rows[m]);
      transpose(to);
    }
  }

  template <int Tile>
  static void store_transposed(float* scores, int64_t ld, int M) {
    __m512i v[16];
    T::template store<Tile>(v, 64);
    transpose(v);
    for (int m = 0; m < M; ++m) _mm512_storeu_si512(scores + m * ld, v[m]);
  }

  static void scores(const float* q, int M, const void* keys, int first, int count, int D, float* out,
                     int64_t ld) {
    const int width = padded(D), end = (first + count + 31) / 32 * 32;
    const int64_t stride = 2 * static_cast<int64_t>(width);
    __m512i queries[kMostColumns / 2];
    configure();
    for (int m = 0; m < M; m += kRows) {
      const int here = M - m < kRows ? M - m : kRows;
      lay_out(q + static_cast<int64_t>(m) * D, here, D, queries);
      for (int j = first / 32 * 32; j < end; j += 32) {
        const char* k = static_cast<const char*>(keys) + j * stride;
        T::template zero<0>();
        T::template zero<1>();
        for (int d = 0; d < width; d += 32, k += 64) {
          T::template load<4>(queries + d / 2, 64);
          T::template load<5>(k, stride);
          T::template load<6>(k + 16 * stride, stride);
          T::template add_bf16<0, 5, 4>();
          T::template add_bf16<1, 6, 4>();
        }
        store_transposed<0>(out + m * ld + j, ld, here);
        store_transposed<1>(out + m * ld + j + 16, ld, here);
      }
    }
    T::release();
  }

  template <int Tile>
  static void store_sums(float* to, int64_t ld, int M, int left) {
    if (left <= 0) return;
    __m512 v[16];
    T::template store<Tile>(v, 64);
    for (int m = 0; m < M; ++m) {
      if (left >= 16) {
        V::store(to + m * ld, v[m]);
      } else {
        V::store_first(to + m * ld, v[m], left);
      }
    }
  }

  static void weighted_sum(const float* p, int64_t ld, int M, const void* values, int first, int count, int D,
                           float* out) {
    const int width = padded(D), begin = first / 32 * 32, end = (first + count + 31) / 32 * 32;
    const int64_t stride = 4 * static_cast<int64_t>(width);
    alignas(64) uint16_t weights[kRows][TileAttention::kPositions];
    configure();
    for (int m = 0; m < M; m += kRows) {
      const int here = M - m < kRows ? M - m : kRows;
      for (int r = 0; r < kRows; ++r) {
        for (int j = begin; j < end; j += 16)
          V::store_bf16(weights[r] + j, r < here ? V::load(p + (m + r) * ld + j) : V::zero());
      }
      for (int d = 0; d < width; d += 64) {
        const bool second = d + 32 < width;
        T::template zero<0>();
        T::template zero<1>();
        T::template zero<2>();
        T::template zero<3>();
        for (int j = begin; j < end; j += 32) {
          const char* v = static_cast<const char*>(values) + j / 2 * stride + 4 * d;
          T::template load<4>(weights[0] + j, sizeof weights[0]);
          T::template load<5>(v, stride);
          T::template add_bf16<0, 4, 5>();
          T::template load<6>(v + 64, stride);
          T::template add_bf16<1, 4, 6>();
          if (!second) continue;
          T::template load<7>(v + 128, stride);
          T::template add_bf16<2, 4, 7>();
          T::template load<5>(v + 192, stride);
          T::template add_bf16<3, 4, 5>();
        }
        float* to = out + static_cast<int64_t>(m) * D + d;
        store_sums<0>(to, D, here, D - d);
        store_sums<1>(to + 16, D, here, D - d - 16);
        store_sums<2>(to + 32, D, here, second ? D - d - 32 : 0);
        store_sums<3>(to + 48, D, here, second ? D - d - 48 : 0);
      }
    }
    T::release();
  }

  static constexpr TileAttention kKernels = {put_keys, put_values, scores, weighted_sum};
};

}  // namespace
}  // namespace twofold::kernels
