// How the AMX level uses its eight tiles, written over T, which carries out the tile instructions: the CPU's
// (amx.cpp) or plain code with the same meaning (amx_emulated.cpp).
//
// Tiles: 0-3 are sums, [16 tokens][16 rows of weights] for two groups of tokens x the two halves of a panel;
// 4 and 5 hold activations of the two groups, one row per token; 6 and 7 hold weights of the two halves.
// Sixteen rows of a slice are 64 consecutive bytes of a panel, and slices are 128 bytes apart, so weights are
// loaded as tiles from where they lie.
#pragma once
#include <immintrin.h>

#include "levels.h"

namespace twofold::kernels {
namespace {

struct alignas(64) TileConfig {  // as ldtilecfg reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// How M tokens are cut into groups of one size, because reconfiguring tiles costs as much as a group of
// products (180 ns measured). The last groups may overlap; an overlap is computed twice, to the same bits.
struct TokenGroups {
  int M, count, size;

  TokenGroups(int num_tokens, int most)
      : M(num_tokens), count((num_tokens + most - 1) / most), size((num_tokens + count - 1) / count) {}
  int begin(int group) const { return group * size < M - size ? group * size : M - size; }
};

template <class T>
struct AmxTiles {
  static constexpr int kGroup = 16;  // tokens of a tile
  static constexpr int kTokens = 2 * kGroup;
  static constexpr int kTileSlice = 4 * kPanelRows;  // bytes

  // Tiles for `tokens` (1 to 32) rows of activations, `x_bytes` of each at a time.
  static void configure(int tokens, int x_bytes) {
    TileConfig config;
    for (int group = 0; group < 2; ++group) {
      const int here = group == 0 ? (tokens < kGroup ? tokens : kGroup) : tokens - kGroup;
      if (here <= 0) break;
      config.set(2 * group, here, 64);
      config.set(2 * group + 1, here, 64);
      config.set(4 + group, here, x_bytes);
    }
    config.set(6, x_bytes / 4, 64);
    config.set(7, x_bytes / 4, 64);
    T::configure(&config);
  }

  // sums[t][32] += x[t][.] * w[.][32] for one tile's worth of columns; Add is the product of two tiles.
  template <class Add>
  static void multiply(const void* x, int64_t row_bytes, const uint8_t* slices, bool second, const Add& add) {
    T::template load<6>(slices, kTileSlice);
    T::template load<4>(x, row_bytes);
    add.template operator()<0, 4, 6>();
    T::template load<7>(slices + 64, kTileSlice);
    add.template operator()<1, 4, 7>();
    if (!second) return;
    T::template load<5>(static_cast<const char*>(x) + kGroup * row_bytes, row_bytes);
    add.template operator()<2, 5, 6>();
    add.template operator()<3, 5, 7>();
  }

  static void zero_sums(bool second) {
    T::template zero<0>();
    T::template zero<1>();
    if (!second) return;
    T::template zero<2>();
    T::template zero<3>();
  }

  // sums [tokens][32] of 4 bytes.
  static void load_sums(const void* sums, bool second) {
    const char* from = static_cast<const char*>(sums);
    T::template load<0>(from, kTileSlice);
    T::template load<1>(from + 64, kTileSlice);
    if (!second) return;
    T::template load<2>(from + kGroup * kTileSlice, kTileSlice);
    T::template load<3>(from + kGroup * kTileSlice + 64, kTileSlice);
  }
  static void store_sums(void* sums, bool second) {
    char* to = static_cast<char*>(sums);
    T::template store<0>(to, kTileSlice);
    T::template store<1>(to + 64, kTileSlice);
    if (!second) return;
    T::template store<2>(to + kGroup * kTileSlice, kTileSlice);
    T::template store<3>(to + kGroup * kTileSlice + 64, kTileSlice);
  }
};

}  // namespace
}  // namespace twofold::kernels
