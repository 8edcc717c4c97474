// Products of float32 activations with packed f32, f16, bf16 and fp8 weights, written once over a vector type
// V (see simd_kernels.h for who supplies it). Every level gives the bits of generic_packed.cpp: per output
// element 64 columns are added up one after the other (P), then P is added to the total.
//
// Few tokens: a panel is one ascending stream, widened in registers, all 32 rows at once. Many tokens: 64
// columns of the panel are widened into a buffer in the first-level cache (f32 is used where it is) and all
// tokens pass over it, a tile of them at a time in registers.
#pragma once
#include <cstdint>

#include "twofold/packed_kernels.h"

namespace twofold::kernels {

template <class V>
struct PackedFloat {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kVectors = kPanelRows / kLanes;  // of a panel's rows
  static constexpr int kStep = 4 * kPanelRows;          // bytes
  static constexpr int kBlock = 64;                     // columns of a partial sum
  static constexpr int kTileTokens = V::kPackedTokens;  // with two vectors of rows: as many as registers hold
  static constexpr int kDirectTokens = V::kDirectTokens;
  static constexpr int kTokenBlock =
      48;  // whose totals are held on the stack and whose rows in the second-level cache

  static constexpr int kAheadBytes = 8192;  // prefetched, for few tokens

  // What a format is to these kernels: `kStepColumns` per step, where the steps of a block of 64 columns
  // begin, how a vector of rows of one step is widened, and what finishes a partial sum.
  template <int Columns>
  struct Elements {
    static constexpr int kStepColumns = Columns, kPanelColumns = Columns;
    static constexpr int kBlockSteps = kBlock / Columns;
    static const uint8_t* steps(const uint8_t* panel, int64_t block) {
      return panel + block * kBlockSteps * kStep;
    }
    static F add(const uint8_t*, int64_t, int, F partial, F total) { return V::add(total, partial); }
  };
  struct F32 : Elements<1> {
    static constexpr WeightFormat kFormat = WeightFormat::kF32;
    static void load(const uint8_t* p, F w[1]) { w[0] = V::load(reinterpret_cast<const float*>(p)); }
  };
  struct F16 : Elements<2> {
    static constexpr WeightFormat kFormat = WeightFormat::kF16;
    static void load(const uint8_t* p, F w[2]) { V::load_f16_step(p, w); }
  };
  struct BF16 : Elements<2> {
    static constexpr WeightFormat kFormat = WeightFormat::kBF16;
    static void load(const uint8_t* p, F w[2]) { V::load_bf16_step(p, w); }
  };
  struct FP8 {
    static constexpr WeightFormat kFormat = WeightFormat::kFP8;
    static constexpr int kStepColumns = 4, kPanelColumns = 128, kBlockSteps = 16;
    static const uint8_t* begin(const uint8_t* panel, int64_t block) {
      return panel + block / 2 * (33 * kStep);
    }
    static const uint8_t* steps(const uint8_t* panel, int64_t block) {
      return begin(panel, block) + kStep + block % 2 * (kBlockSteps * kStep);
    }
    static void load(const uint8_t* p, F w[4]) { V::load_fp8_step(p, w); }
    static F add(const uint8_t* panel, int64_t block, int vector, F partial, F total) {
      const F scale = V::load(reinterpret_cast<const float*>(begin(panel, block)) + vector * kLanes);
      return V::fma(partial, V::mul(scale, V::set1(256.0f)), total);
    }
  };

  // T tokens against all rows over a block of `steps` steps.
  template <class W, int T>
  static void direct_block(const uint8_t* panel, int64_t block, int steps, const float* x, int64_t ldx,
                           float* totals) {
    F acc[T][kVectors];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[t][v] = V::zero();
    }
    const uint8_t* p = W::steps(panel, block);
    const float* values = x + block * kBlock;
    for (int s = 0; s < steps; ++s, values += W::kStepColumns, p += kStep) {
      V::prefetch(p + kAheadBytes);
      V::prefetch(p + kAheadBytes + 64);
      F w[kVectors][W::kStepColumns];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) W::load(p + v * (kStep / kVectors), w[v]);
#pragma GCC unroll 4
      for (int c = 0; c < W::kStepColumns; ++c) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const F value = V::set1(values[t * ldx + c]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) acc[t][v] = V::fma(value, w[v][c], acc[t][v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* total = totals + t * kPanelRows + v * kLanes;
        V::store(total, W::add(panel, block, v, acc[t][v], V::load(total)));
      }
    }
  }

  static constexpr int64_t steps_of(int64_t columns, int step_columns, int panel_columns) {
    return (columns + panel_columns - 1) / panel_columns * panel_columns / step_columns;
  }

  template <class W, int T>
  static void direct(const float* x, int64_t ldx, const uint8_t* panels, float* y, int64_t ldy, int N,
                     int K) {
    const int64_t steps = steps_of(K, W::kStepColumns, W::kPanelColumns);
    const int64_t whole = steps / W::kBlockSteps;
    for (int n = 0; n < N; n += kPanelRows, panels += panel_bytes(W::kFormat, K)) {
      alignas(64) float totals[T * kPanelRows] = {};
      for (int64_t block = 0; block < whole; ++block)
        direct_block<W, T>(panels, block, W::kBlockSteps, x, ldx, totals);
      const int rest = static_cast<int>(steps - whole * W::kBlockSteps);
      if (rest > 0) direct_block<W, T>(panels, whole, rest, x, ldx, totals);
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
  template <class W, int T>
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
        if constexpr (W::kFormat == WeightFormat::kF32) V::prefetch(fetch + 64);
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
          V::store(total, W::add(panel, block, v + i, acc[t][i], V::load(total)));
        }
      }
    }
  }

  template <class W, int T>
  static void tile_of(int tokens, const float* x, int64_t ldx, const float* w, int columns,
                      const uint8_t* fetch, int fetch_bytes, const uint8_t* panel, int64_t block,
                      float* totals) {
    if constexpr (T > 1) {
      if (tokens < T)
        return tile_of<W, T - 1>(tokens, x, ldx, w, columns, fetch, fetch_bytes, panel, block, totals);
    }
    tile<W, T>(x, ldx, w, columns, fetch, fetch_bytes, panel, block, totals);
  }

  // 64 columns of a panel as float32 [columns][32].
  template <class W>
  static const float* widened(const uint8_t* panel, int64_t block, int steps, float* buffer) {
    const uint8_t* p = W::steps(panel, block);
    for (int s = 0; s < steps; ++s, p += kStep) {
      if constexpr (W::kFormat != WeightFormat::kF32) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          F w[W::kStepColumns];
          if constexpr (W::kFormat == WeightFormat::kFP8) {
            V::widen_fp8_step(p + v * (kStep / kVectors), w);
          } else {
            W::load(p + v * (kStep / kVectors), w);
          }
#pragma GCC unroll 4
          for (int c = 0; c < W::kStepColumns; ++c) {
            V::store(buffer + (s * W::kStepColumns + c) * kPanelRows + v * kLanes, w[c]);
          }
        }
      }
    }
    return W::kFormat == WeightFormat::kF32 ? reinterpret_cast<const float*>(W::steps(panel, block)) : buffer;
  }

  template <class W>
  static constexpr int kFetch = W::kFormat == WeightFormat::kF32 ? 128 : 64;
  // f32 is read in the order of its prefetches; what is widened is read at once, so a block more lies
  // between.
  template <class W>
  static constexpr int kFetchAhead = W::kFormat == WeightFormat::kF32 ? 0 : W::kBlockSteps * kStep;

  template <class W>
  static void tiles(const float* x, int64_t ldx, const uint8_t* panels, float* y, int64_t ldy, int M, int N,
                    int K) {
    const int64_t steps = steps_of(K, W::kStepColumns, W::kPanelColumns);
    alignas(64) float buffer[kBlock * kPanelRows];
    alignas(64) float totals[kTokenBlock * kPanelRows];
    for (int n = 0; n < N; n += kPanelRows, panels += panel_bytes(W::kFormat, K)) {
      for (int i = 0; i < M * kPanelRows; i += kLanes) V::store(totals + i, V::zero());
      for (int64_t first = 0, block = 0; first < steps; first += W::kBlockSteps, ++block) {
        const int here = static_cast<int>(steps - first < W::kBlockSteps ? steps - first : W::kBlockSteps);
        const float* w = widened<W>(panels, block, here, buffer);
        const uint8_t* next = W::steps(panels, block) + here * kStep + kFetchAhead<W>;
        int left = (M + kTileTokens - 1) / kTileTokens;
        for (int m = 0; m < M; --left) {
          const int tokens = (M - m + left - 1) / left;  // as even as possible
          // The first who come fetch what follows.
          tile_of<W, kTileTokens>(tokens, x + m * ldx + block * kBlock, ldx, w, here * W::kStepColumns, next,
                                  m > 0 ? 0 : kFetch<W>, panels, block, totals + m * kPanelRows);
          m += tokens;
        }
      }
      write(totals, M, y + n, ldy, N - n);
    }
  }

  template <class W>
  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    const float* rows = static_cast<const float*>(x);
    const int64_t ldx = row_bytes / 4;
    const uint8_t* p = static_cast<const uint8_t*>(panels);
    if (M == 1) return direct<W, 1>(rows, ldx, p, y, ldy, N, K);
    if (M == 2) return direct<W, 2>(rows, ldx, p, y, ldy, N, K);
    if constexpr (kDirectTokens >= 4) {
      if (M == 3) return direct<W, 3>(rows, ldx, p, y, ldy, N, K);
      if (M == 4) return direct<W, 4>(rows, ldx, p, y, ldy, N, K);
    }
    int left = (M + kTokenBlock - 1) / kTokenBlock;
    for (int m = 0; m < M; --left) {
      const int tokens = (M - m + left - 1) / left;
      tiles<W>(rows + m * ldx, ldx, p, y + m * ldy, ldy, tokens, N, K);
      m += tokens;
    }
  }

  template <class W>
  static constexpr void add_to(KernelTable& table) {
    FormatKernels& kernels = table.formats[static_cast<int>(W::kFormat)];
    kernels.activation = ActivationKind::kF32;
    kernels.matmul = matmul<W>;
  }

  static constexpr void add_all(KernelTable& table) {
    add_to<F32>(table);
    add_to<F16>(table);
    add_to<BF16>(table);
    add_to<FP8>(table);
  }
};

}  // namespace twofold::kernels
