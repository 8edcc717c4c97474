// Products of q8_token activations with the panels of integer formats that have one scale for a row, written once
// over a vector type V and a format (twofold/formats/). A product is one sum of integers over all columns, so it
// stays in a register from the first to the last; it starts at the correction for the offset of unsigned weights.
//
// A panel (32 rows) stays in the second-level cache while tiles of a few activation rows pass over it. Anonymous
// namespace: each file that includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <cstdint>

#include "levels.h"
#include "twofold/packed_kernels.h"

namespace twofold::kernels {
namespace {

// Encoded activation rows.
struct ChannelRows {
  const int8_t* q;
  int64_t row_bytes, columns;  // columns with those that are added

  static ChannelRows of(const void* x, int64_t row_bytes, int K) {
    return {static_cast<const int8_t*>(x), row_bytes, activation_columns(K)};
  }
  ChannelRows from(int row) const { return {q + row * row_bytes, row_bytes, columns}; }
  float scale(int row) const { return load_as<float>(q + row * row_bytes + columns); }
  int32_t sum(int row) const { return load_as<int32_t>(q + row * row_bytes + columns + 4); }
};

template <class V, class Format>
struct ChannelProducts {
  using I = typename V::I;
  using F = typename V::F;
  using Dot = typename V::template ChannelDot<Format::kDotBits>;
  static constexpr int kTokens = Dot::kTokens;  // activation rows of a tile, at most
  static constexpr int kStrip = 192;            // activation rows that stay in the second-level cache
  static constexpr int kSubblockLines = (Format::kPanelBytes / Format::kSubblocks + 63) / 64;
  static constexpr int64_t kAheadBytes = 5120;  // prefetched, by a tile that has the panel for itself

  // A panel, and what to bring into the cache meanwhile: `lines` for every subblock.
  struct Panel {
    const uint8_t* blocks;
    int num_blocks;
    const char* next;
    int lines;
  };

  // T activation rows against G vectors of a panel's rows.
  template <int T, int G>
  static void tile(const ChannelRows& rows, const Panel& panel, int g0, float* out) {
    I sums[T][G];
    const int8_t* x[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      x[t] = rows.q + t * rows.row_bytes;
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[t][g] = V::same(-Format::kZero * rows.sum(t));
    }
    const uint8_t* block = panel.blocks + V::kBytes * g0;
    const char* next = panel.next;
    for (int b = 0; b < panel.num_blocks; ++b, block += Format::kPanelBytes) {
      for (int pair = 0; 2 * pair < Format::kSubblocks; ++pair) {
#pragma GCC unroll 2
        for (int odd = 0; odd < (Format::kSubblocks < 2 ? 1 : 2); ++odd) {
          for (int i = 0; i < panel.lines; ++i, next += 64) V::prefetch(next);
          typename Dot::Run of_run[T][G];
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) of_run[t][g] = Dot::begin(sums[t][g]);
          }
#pragma GCC unroll 8
          for (int slice = 0; slice < 8; ++slice) {
            typename Dot::Weights w[G];
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
              w[g] = Dot::weights(Format::template bytes<V>(block, pair, odd, slice, g));
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
              const I values = V::broadcast(x[t] + 4 * slice);
#pragma GCC unroll 4
              for (int g = 0; g < G; ++g) Dot::add(of_run[t][g], w[g], values);
            }
          }
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            x[t] += kSubblockColumns;
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) sums[t][g] = Dot::end(sums[t][g], of_run[t][g]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F scale = Format::template scale<V>(panel.blocks, 0, 0, g0 + g);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        V::store(out + kPanelRows * t + V::kLanes * (g0 + g),
                 V::mul(V::mul(V::to_float(sums[t][g]), scale), V::set1(rows.scale(t))));
      }
    }
  }

  template <int T>
  static void tile_of(int tokens, const ChannelRows& rows, Panel panel, float* out) {
    if constexpr (T > 1) {
      if (tokens < T) return tile_of<T - 1>(tokens, rows, panel, out);
    }
    constexpr int kVectors = Dot::vectors(T);  // for a pass
    for (int g = 0; g < kPanelRows / V::kLanes; g += kVectors) {
      tile<T, kVectors>(rows, panel, g, out);
      panel.lines = 0;
    }
  }

  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    const ChannelRows all = ChannelRows::of(x, row_bytes, K);
    const int num_blocks = (K + Format::kPanelColumns - 1) / Format::kPanelColumns;
    const int64_t panel_bytes = int64_t{num_blocks} * Format::kPanelBytes;
    alignas(64) float out[kTokens * kPanelRows];
    for (int begin = 0; begin < M; begin += kStrip) {
      const int tokens = M - begin < kStrip ? M - begin : kStrip;
      const int tiles = (tokens + kTokens - 1) / kTokens;
      const int lines = (kSubblockLines + tiles - 1) / tiles;
      const uint8_t* panel = static_cast<const uint8_t*>(panels);
      for (int n = 0; n < N; n += kPanelRows, panel += panel_bytes) {
        const int rows = N - n < kPanelRows ? N - n : kPanelRows;
        // Several tiles bring the next panel, each its part.
        const char* next = reinterpret_cast<const char*>(panel) + (tiles == 1 ? kAheadBytes : panel_bytes);
        for (int tile = 0, m = 0; tile < tiles; ++tile) {
          const int end = tokens * (tile + 1) / tiles;  // as even as possible
          tile_of<kTokens>(end - m, all.from(begin + m), {panel, num_blocks, next, lines}, out);
          next += int64_t{64} * lines * num_blocks * Format::kSubblocks;
          float* to = y + (begin + m) * ldy + n;
          for (int t = 0; t < end - m; ++t) V::store_rows(out + kPanelRows * t, rows, to + t * ldy);
          m = end;
        }
      }
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
