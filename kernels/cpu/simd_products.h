// Dot products of activation rows with weight rows, written once over a vector type V (simd_kernels.h lists
// its suppliers and what it may be shared with): only the tiles and their read order.
//
// Weights are widened to float32 and multiplied with float32 activations. Every dot product uses V::kLanes
// partial sums, one vector register per output element, and V::sum4's reduction tree: halves added, then
// quarters, and so on. Tiles only decide how many such elements are computed side by side.
#pragma once
#include <cstdint>

#include "twofold/kernels.h"

namespace twofold::kernels {

template <class V>
struct Products {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kRows = 4;                      // weight rows per tile
  static constexpr int kTokens = V::kTokens;           // activation rows per tile, at most
  static constexpr int kPrefetchBytes = 4096;          // bytes prefetched ahead for a single activation row
  static constexpr int64_t kPackedBytes = 64 * 1024;   // a tile's activations, on the stack
  static constexpr int64_t kWeightBytes = 256 * 1024;  // passed by all tokens before the next

  // T activation rows as a tile reads them: slice by slice along K, the rows side by side, zeros after the
  // last. One ascending stream instead of T, whose rows would share cache sets when K is a power of two.
  static void pack(const float* x, int64_t ldx, int T, int K, float* to) {
    for (int t = 0; t < T; ++t) {
      const float* row = x + t * ldx;
      float* column = to + t * kLanes;
      int k = 0;
      for (; k + kLanes <= K; k += kLanes, column += T * kLanes) V::store(column, V::load(row + k));
      if (k < K) V::store(column, V::load_first(row + k, K - k));
    }
  }

  // out[t * ldo + r] = x_t . w_r for T packed activation rows and R consecutive weight rows. Weights are
  // prefetched `ahead` elements further on: those of the next tile while they are read for the first time,
  // nothing (0) later.
  template <class W, int R, int T>
  static void dot_tile(const float* x, const W* w, float* out, int64_t ldo, int K, int64_t ahead) {
    F acc[T][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[t][r] = V::zero();
    }
    int k = 0;
    for (; k + kLanes <= K; k += kLanes, x += T * kLanes) {
      F row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        row[r] = V::load(w + static_cast<int64_t>(r) * K + k);
        V::prefetch_l2(w + static_cast<int64_t>(r) * K + k + ahead);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const F value = V::load(x + t * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r] = V::fma(value, row[r], acc[t][r]);
      }
    }
    if (k < K) {
      F row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) row[r] = V::load_first(w + static_cast<int64_t>(r) * K + k, K - k);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const F value = V::load(x + t * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r] = V::fma(value, row[r], acc[t][r]);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      if constexpr (R == kRows) {
        V::sum4(acc[t][0], acc[t][1], acc[t][2], acc[t][3], out + t * ldo);
      } else {
        float sums[kRows];
        V::sum4(acc[t][0], acc[t][1], acc[t][2], acc[t][3], sums);
        for (int r = 0; r < R; ++r) out[t * ldo + r] = sums[r];
      }
    }
  }

  // The same for one activation row, bound by memory: one weight row after the other, so that memory is read
  // in one ascending stream, which suits its prefetchers and ours best.
  template <class W, int R>
  static void dot_one(const float* x, const W* w, float* out, int K) {
    constexpr int kVectorBytes = kLanes * static_cast<int>(sizeof(W));
    constexpr int kLine =
        kVectorBytes >= 64 ? kLanes : kLanes * (64 / kVectorBytes);  // elements per prefetch
    F acc[kRows] = {V::zero(), V::zero(), V::zero(), V::zero()};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const W* row = w + static_cast<int64_t>(r) * K;
      int k = 0;
      for (; k + kLine <= K; k += kLine) {
        V::prefetch(row + k + kPrefetchBytes / static_cast<int>(sizeof(W)));
#pragma GCC unroll 4
        for (int i = 0; i < kLine; i += kLanes)
          acc[r] = V::fma(V::load(x + k + i), V::load(row + k + i), acc[r]);
      }
      for (; k + kLanes <= K; k += kLanes) acc[r] = V::fma(V::load(x + k), V::load(row + k), acc[r]);
      if (k < K) acc[r] = V::fma(V::load_first(x + k, K - k), V::load_first(row + k, K - k), acc[r]);
    }
    float sums[kRows];
    V::sum4(acc[0], acc[1], acc[2], acc[3], sums);
    for (int r = 0; r < R; ++r) out[r] = sums[r];
  }

  template <class W>
  static void dot_one_rows(const float* x, const W* w, float* out, int N, int K) {
    int n = 0;
    for (; n + kRows <= N; n += kRows) dot_one<W, kRows>(x, w + static_cast<int64_t>(n) * K, out + n, K);
    for (; n < N; ++n) dot_one<W, 1>(x, w + static_cast<int64_t>(n) * K, out + n, K);
  }

  template <class W, int R>
  static void dot_tokens(const float* x, const W* w, float* out, int64_t ldo, int tokens, int K,
                         int64_t ahead) {
    if constexpr (kTokens >= 6) {
      if (tokens == 6) return dot_tile<W, R, 6>(x, w, out, ldo, K, ahead);
      if (tokens == 5) return dot_tile<W, R, 5>(x, w, out, ldo, K, ahead);
      if (tokens == 4) return dot_tile<W, R, 4>(x, w, out, ldo, K, ahead);
      if (tokens == 3) return dot_tile<W, R, 3>(x, w, out, ldo, K, ahead);
    }
    if (tokens == 2) return dot_tile<W, R, 2>(x, w, out, ldo, K, ahead);
    if constexpr (!V::kStreamsRows) dot_tile<W, R, 1>(x, w, out, ldo, K, ahead);
  }

  static int64_t packed_bytes(int K) {
    const int64_t slices = (static_cast<int64_t>(K) + kLanes - 1) / kLanes;
    return slices * kLanes * static_cast<int64_t>(sizeof(float));
  }

  // Activation rows per tile: its registers' worth, or as many as can be packed.
  static int tile_tokens(int K) {
    const int64_t row_bytes = packed_bytes(K);
    if (row_bytes * kTokens <= kPackedBytes) return kTokens;
    return row_bytes * 2 <= kPackedBytes ? static_cast<int>(kPackedBytes / row_bytes) : 1;
  }

  // A few activation rows against all of some weight rows; the first rows bring the weights into the
  // caches.
  template <class W>
  static void dot_rows(const float* x, int64_t ldx, const W* w, float* out, int64_t ldo, int tokens, int N,
                       int K, bool first) {
    const bool fits =
        packed_bytes(K) * tokens <= kPackedBytes;  // one row may be too long to pack, two never are
    if (tokens == 1 && (!fits || V::kStreamsRows)) return dot_one_rows<W>(x, w, out, N, K);
    alignas(64) float packed[kPackedBytes / sizeof(float)];
    pack(x, ldx, tokens, K, packed);
    int n = 0;
    const int64_t ahead = first ? static_cast<int64_t>(kRows) * K : 0;
    for (; n + kRows <= N; n += kRows) {
      dot_tokens<W, kRows>(packed, w + static_cast<int64_t>(n) * K, out + n, ldo, tokens, K, ahead);
    }
    for (; n < N; ++n)
      dot_tokens<W, 1>(packed, w + static_cast<int64_t>(n) * K, out + n, ldo, tokens, K, ahead);
  }

  // Weight rows that stay in the second-level cache while the tiles of activations pass.
  template <class W>
  static int block_rows(int N, int K) {
    const int64_t row_bytes = static_cast<int64_t>(K) * static_cast<int64_t>(sizeof(W));
    const int64_t fit = row_bytes == 0 ? N : kWeightBytes / row_bytes / kRows * kRows;
    return fit >= N ? N : fit > kRows ? static_cast<int>(fit) : kRows;
  }

  template <class W>
  static void matmul(const float* x, int64_t ldx, const void* weights, float* y, int64_t ldy, int M, int N,
                     int K) {
    const W* w = static_cast<const W*>(weights);
    const int most = tile_tokens(K);
    const int block = M <= most ? N : block_rows<W>(N, K);
    for (int n = 0; n < N; n += block) {
      const int rows = N - n < block ? N - n : block;
      int tiles = (M + most - 1) / most;
      for (int m = 0; m < M; --tiles) {
        const int tokens = (M - m + tiles - 1) / tiles;  // as even as possible
        dot_rows<W>(x + m * ldx, ldx, w + static_cast<int64_t>(n) * K, y + m * ldy + n, ldy, tokens, rows, K,
                    m == 0);
        m += tokens;
      }
    }
  }
};

}  // namespace twofold::kernels
