// Products of float32 activations with packed f32, f16, bf16 and fp8 weights, written once over a vector type
// V (simd_kernels.h lists its suppliers). Every level gives the bits of generic/packed.cpp: per output
// element 64 columns are added up one after the other (P), then P is added to the total.
//
// Few tokens: a panel is one ascending stream, widened in registers; all 32 rows at once or, where registers are too
// few, 16 rows of a block and then the other 16 from the first-level cache. Many tokens: 64 columns of the panel are
// widened into a buffer in that cache (f32 is used where it is) and all tokens pass over it, a tile of them at a time
// in registers.
#pragma once
#include <cstdint>

#include "twofold/packed_kernels.h"

namespace twofold::kernels {

template <class V>
struct PackedFloat {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kVectors = kPanelRows / kLanes;  // a panel's rows
  static constexpr int kBlock = 64;                     // columns of a partial sum
  static constexpr int kTileTokens = V::kPackedTokens;  // with two vectors of rows: as many as registers hold
  static constexpr int kDirectTokens = V::kDirectTokens;  // that leave registers for all of a panel's rows
  static constexpr int kDirectTile = V::kDirectTile;      // with two vectors of rows
  static constexpr int kTokenBlock =
      48;  // whose totals are held on the stack and whose rows in the second-level cache

  static constexpr int kAheadBytes = 8192;  // prefetched, for few tokens

  // How a format (plain.h, fp8.h) lies in blocks of 64 columns: where one begins, its slices, and what finishes a
  // partial sum.
  template <class Format>
  struct Blocks {
    static constexpr int kSlices = kBlock / Format::kSliceColumns;
    static constexpr bool kScaled = Format::kHeaderBytes > 0;
    static const uint8_t* begin(const uint8_t* panel, int64_t block) {
      if constexpr (kScaled) {
        return panel + block / (Format::kPanelColumns / kBlock) * Format::kPanelBytes;
      } else {
        return panel + block * (kSlices * kSliceBytes);
      }
    }
    static const uint8_t* slices(const uint8_t* panel, int64_t block) {
      if constexpr (kScaled) {
        return begin(panel, block) + Format::kHeaderBytes +
               block % (Format::kPanelColumns / kBlock) * (kSlices * kSliceBytes);
      } else {
        return begin(panel, block);
      }
    }
    static F add(const uint8_t* panel, int64_t block, int vector, F partial, F total) {
      if constexpr (kScaled) {
        const F scale = V::load(reinterpret_cast<const float*>(begin(panel, block)) + vector * kLanes);
        return V::fma(partial, V::mul(scale, V::set1(Format::kFactor)), total);
      } else {
        return V::add(total, partial);
      }
    }
  };
  template <class Format>
  static constexpr bool kUnconverted = Format::kSliceColumns == 1;  // float32: nothing is widened

  // T tokens against G vectors of rows from `first` on, over a block of `slices` slices. kAhead: prefetches what follows.
  template <class Format, int T, int G, bool kAhead>
  static void direct_block(const uint8_t* panel, int64_t block, int slices, int first, const float* x,
                           int64_t ldx, float* totals) {
    constexpr int kColumns = Format::kSliceColumns, kVectorBytes = kSliceBytes / kVectors;
    F acc[T][G];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < G; ++v) acc[t][v] = V::zero();
    }
    const uint8_t* p = Blocks<Format>::slices(panel, block) + first * kVectorBytes;
    const float* values = x + block * kBlock;
    for (int s = 0; s < slices; ++s, values += kColumns, p += kSliceBytes) {
      if constexpr (kAhead) {
        V::prefetch(p + kAheadBytes);
        V::prefetch(p + kAheadBytes + 64);
      }
      if constexpr (T <= kDirectTokens) {  // activations in registers
        F value[T][kColumns];
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) value[t][c] = V::set1(values[t * ldx + c]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < G; ++v) {
          F w[kColumns];
          Format::template widen<V>(p + v * kVectorBytes, w);
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) acc[t][v] = V::fma(value[t][c], w[c], acc[t][v]);
          }
        }
      } else {  // weights in registers
        F w[G][kColumns];
#pragma GCC unroll 4
        for (int v = 0; v < G; ++v) Format::template widen<V>(p + v * kVectorBytes, w[v]);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            const F value = V::set1(values[t * ldx + c]);
#pragma GCC unroll 4
            for (int v = 0; v < G; ++v) acc[t][v] = V::fma(value, w[v][c], acc[t][v]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < G; ++v) {
        float* total = totals + t * kPanelRows + (first + v) * kLanes;
        V::store(total, Blocks<Format>::add(panel, block, first + v, acc[t][v], V::load(total)));
      }
    }
  }

  static constexpr int64_t slices_of(int64_t columns, int slice_columns, int panel_columns) {
    return (columns + panel_columns - 1) / panel_columns * panel_columns / slice_columns;
  }

  // T tokens against a block: as many rows at a time as leave registers, the first of which prefetch if kAhead.
  template <class Format, int T, bool kAhead>
  static void direct_rows(const uint8_t* panel, int64_t block, int slices, const float* x, int64_t ldx,
                          float* totals) {
    constexpr int G = T <= kDirectTokens ? kVectors : 2;
    direct_block<Format, T, G, kAhead>(panel, block, slices, 0, x, ldx, totals);
    for (int v = G; v < kVectors; v += G)
      direct_block<Format, T, G, false>(panel, block, slices, v, x, ldx, totals);
  }

  // M tokens, at most T, in tiles of as even a size as possible.
  template <class Format, int T>
  static void direct(const float* x, int64_t ldx, const uint8_t* panels, float* y, int64_t ldy, int M, int N,
                     int K) {
    if constexpr (T > 1) {
      if (M < T) return direct<Format, T - 1>(x, ldx, panels, y, ldy, M, N, K);
    }
    constexpr int kTiles = (T + kDirectTile - 1) / kDirectTile, kFirst = (T + kTiles - 1) / kTiles;
    static_assert(kTiles <= 2);
    const int64_t slices = slices_of(K, Format::kSliceColumns, Format::kPanelColumns);
    for (int n = 0; n < N; n += kPanelRows, panels += panel_bytes(kNumberOf<Format>, K)) {
      alignas(64) float totals[T * kPanelRows] = {};
      for (int64_t first = 0, block = 0; first < slices; first += Blocks<Format>::kSlices, ++block) {
        const int here = static_cast<int>(slices - first < Blocks<Format>::kSlices ? slices - first
                                                                                   : Blocks<Format>::kSlices);
        direct_rows<Format, kFirst, true>(panels, block, here, x, ldx, totals);
        if constexpr (kTiles > 1) {
          direct_rows<Format, T - kFirst, false>(panels, block, here, x + kFirst * ldx, ldx,
                                                 totals + kFirst * kPanelRows);
        }
      }
      write(totals, T, y + n, ldy, N - n);
    }
  }

  // Totals of `tokens` rows out to y, whose panel has `rows` left.
  static void write(const float* totals, int tokens, float* y, int64_t ldy, int rows) {
    for (int t = 0; t < tokens; ++t) {
      const float* total = totals + t * kPanelRows;
      float* out = y + t * ldy;
      if (rows >= kPanelRows) {
        for (int v = 0; v < kVectors; ++v) V::store(out + v * kLanes, V::load(total + v * kLanes));
      } else {
        for (int r = 0; r < rows; ++r) out[r] = total[r];
      }
    }
  }

  // A tile: T tokens over `columns` widened columns w [columns][32], two vectors of rows at a time. `fetch`:
  // what to prefetch meanwhile, `fetch_bytes` further on for every column.
  template <class Format, int T>
  static void tile(const float* x, int64_t ldx, const float* w, int columns, const uint8_t* fetch,
                   int fetch_bytes, const uint8_t* panel, int64_t block, float* totals) {
#pragma GCC unroll 1
    for (int v = 0; v < kVectors; v += 2) {
      F acc[T][2];
#pragma GCC unroll 12
      for (int t = 0; t < T; ++t) acc[t][0] = acc[t][1] = V::zero();
      const float* row = w + v * kLanes;
#pragma GCC unroll 2
      for (int k = 0; k < columns; ++k, row += kPanelRows) {
        const F w0 = V::load(row), w1 = V::load(row + kLanes);
        V::prefetch(fetch);
        if constexpr (kUnconverted<Format>) V::prefetch(fetch + 64);
        fetch += fetch_bytes;
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) {
          const F value = V::set1(x[t * ldx + k]);
          acc[t][0] = V::fma(value, w0, acc[t][0]);
          acc[t][1] = V::fma(value, w1, acc[t][1]);
        }
      }
#pragma GCC unroll 12
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          float* total = totals + t * kPanelRows + (v + i) * kLanes;
          V::store(total, Blocks<Format>::add(panel, block, v + i, acc[t][i], V::load(total)));
        }
      }
    }
  }

  template <class Format, int T>
  static void tile_of(int tokens, const float* x, int64_t ldx, const float* w, int columns,
                      const uint8_t* fetch, int fetch_bytes, const uint8_t* panel, int64_t block,
                      float* totals) {
    if constexpr (T > 1) {
      if (tokens < T)
        return tile_of<Format, T - 1>(tokens, x, ldx, w, columns, fetch, fetch_bytes, panel, block, totals);
    }
    tile<Format, T>(x, ldx, w, columns, fetch, fetch_bytes, panel, block, totals);
  }

  // 64 columns of a panel as float32 [columns][32].
  template <class Format>
  static const float* widened(const uint8_t* panel, int64_t block, int slices, float* buffer) {
    const uint8_t* p = Blocks<Format>::slices(panel, block);
    for (int s = 0; s < slices; ++s, p += kSliceBytes) {
      if constexpr (!kUnconverted<Format>) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          F w[Format::kSliceColumns];
          if constexpr (requires { Format::template widen_many<V>; }) {
            Format::template widen_many<V>(p + v * (kSliceBytes / kVectors), w);
          } else {
            Format::template widen<V>(p + v * (kSliceBytes / kVectors), w);
          }
#pragma GCC unroll 4
          for (int c = 0; c < Format::kSliceColumns; ++c) {
            V::store(buffer + (s * Format::kSliceColumns + c) * kPanelRows + v * kLanes, w[c]);
          }
        }
      }
    }
    return kUnconverted<Format> ? reinterpret_cast<const float*>(Blocks<Format>::slices(panel, block))
                                : buffer;
  }

  template <class Format>
  static constexpr int kFetch = kUnconverted<Format> ? 128 : 64;
  // f32 is read in the order of its prefetches; what is widened is read at once, so a block more lies
  // between.
  template <class Format>
  static constexpr int kFetchAhead = kUnconverted<Format> ? 0 : Blocks<Format>::kSlices * kSliceBytes;

  template <class Format>
  static void tiles(const float* x, int64_t ldx, const uint8_t* panels, float* y, int64_t ldy, int M, int N,
                    int K) {
    const int64_t slices = slices_of(K, Format::kSliceColumns, Format::kPanelColumns);
    alignas(64) float buffer[kBlock * kPanelRows];
    alignas(64) float totals[kTokenBlock * kPanelRows];
    for (int n = 0; n < N; n += kPanelRows, panels += panel_bytes(kNumberOf<Format>, K)) {
      for (int i = 0; i < M * kPanelRows; i += kLanes) V::store(totals + i, V::zero());
      for (int64_t first = 0, block = 0; first < slices; first += Blocks<Format>::kSlices, ++block) {
        const int here = static_cast<int>(slices - first < Blocks<Format>::kSlices ? slices - first
                                                                                   : Blocks<Format>::kSlices);
        const float* w = widened<Format>(panels, block, here, buffer);
        const uint8_t* next =
            Blocks<Format>::slices(panels, block) + here * kSliceBytes + kFetchAhead<Format>;
        int left = (M + kTileTokens - 1) / kTileTokens;
        for (int m = 0; m < M; --left) {
          const int tokens = (M - m + left - 1) / left;  // as even as possible
          // The first tokens prefetch the following weights.
          tile_of<Format, kTileTokens>(tokens, x + m * ldx + block * kBlock, ldx, w,
                                       here * Format::kSliceColumns, next, m > 0 ? 0 : kFetch<Format>, panels,
                                       block, totals + m * kPanelRows);
          m += tokens;
        }
      }
      write(totals, M, y + n, ldy, N - n);
    }
  }

  template <class Format>
  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    const float* rows = static_cast<const float*>(x);
    const int64_t ldx = row_bytes / 4;
    const uint8_t* p = static_cast<const uint8_t*>(panels);
    // A second tile widens the weights again.
    constexpr bool kTwice = kDirectTile <= 4 && __is_same(Format, formats::BF16);  // by a shift
    constexpr int kMost = kUnconverted<Format> ? kDirectTokens : kTwice ? 2 * kDirectTile : kDirectTile;
    if (M <= kMost) return direct<Format, kMost>(rows, ldx, p, y, ldy, M, N, K);
    int left = (M + kTokenBlock - 1) / kTokenBlock;
    for (int m = 0; m < M; --left) {
      const int tokens = (M - m + left - 1) / left;
      tiles<Format>(rows + m * ldx, ldx, p, y + m * ldy, ldy, tokens, N, K);
      m += tokens;
    }
  }

  static constexpr void add_all(KernelTable& table) {
    for_each_format([&]<class Format>(Format) {
      if constexpr (!is_integer<Format>) {
        table.formats[static_cast<int>(kNumberOf<Format>)] = {ActivationKind::kF32, matmul<Format>, nullptr};
      }
    });
  }
};

}  // namespace twofold::kernels
