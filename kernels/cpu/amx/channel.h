// The AMX level's products of q8_token activations with integer weights that have one scale for a row, written over
// T (amx/tiles.h) and a format (twofold/formats/). The same bits as channel_products.h, whose AVX-512 products also
// take the calls with few tokens.
//
// Weights of 8 bits are multiplied as they lie in a panel, unsigned; nibbles are unpacked, some columns at a time. The sums
// stay in their tiles: from the first column to the last for up to 32 tokens, whose weights stream past; else over a
// block of columns that stays in the first-level cache while all tokens pass, their sums waiting on the stack. What
// the offset added is taken away at the end.
#pragma once
#include "amx/tiles.h"
#include "avx512/vnni_vector.h"
#include "channel_products.h"

namespace twofold::kernels {
namespace {

template <class T, class Format>
struct AmxChannelProducts {
  using V = Avx512Vnni;
  using Tiles = AmxTiles<T>;
  using Sums = int32_t[Tiles::kTokens * kPanelRows];

  static constexpr int kTileColumns = 64, kTileBytes = 16 * kSliceBytes;  // a tile of weights
  static constexpr int kHeldTiles =
      Format::kNibbles ? 8 : 16;         // that stay in the cache: 32 KiB, or half of it
  static constexpr int kMostGroups = 8;  // whose sums are held
  static constexpr int64_t kAheadBytes = 16384;
  static constexpr int kFewestTokens = T::kAnyTokenCount ? 1 : 9;
  static constexpr int kBytesOfTile =
      Format::kPanelBytes * kTileColumns / Format::kPanelColumns;  // panel bytes per tile, scales included
  static_assert(Format::kNibbles ? Format::kPanelColumns == 32 : Format::kPanelColumns % kTileColumns == 0);

  struct Add {
    template <int C, int A, int B>
    void operator()() const {
      T::template add_signed_unsigned<C, A, B>();
    }
  };

  // Tiles [begin, end) of a panel for a group of tokens, unpacked where there is a buffer; meanwhile what lies `ahead`
  // bytes further on is fetched (0: nothing).
  static void add_tiles(const ChannelRows& rows, bool second, const uint8_t* panel, const uint8_t* unpacked,
                        int begin, int end, int64_t ahead) {
    for (int tile = begin; tile < end; ++tile) {
      const uint8_t* weights = unpacked + (tile - begin) * kTileBytes;
      if constexpr (!Format::kNibbles) {
        constexpr int kTiles = Format::kPanelColumns / kTileColumns;  // in a panel block
        weights = panel + int64_t{tile / kTiles} * Format::kPanelBytes + Format::kHeaderBytes +
                  tile % kTiles * kTileBytes;
      }
      if (ahead != 0) {
        const uint8_t* next = panel + int64_t{tile} * kBytesOfTile + ahead;
        for (int i = 0; i < kBytesOfTile; i += 64) V::prefetch(next + i);
      }
      Tiles::multiply(rows.q + int64_t{tile} * kTileColumns, rows.row_bytes, weights, second, Add());
    }
  }

  // Panel blocks that belong to tiles [begin, end). A last half tile is multiplied with zeros, whatever it holds.
  static void unpack(const uint8_t* panel, int num_blocks, int begin, int end, uint8_t* to) {
    constexpr int kBlocks = kTileColumns / Format::kPanelColumns;
    const int last = end * kBlocks < num_blocks ? end * kBlocks : num_blocks;
    for (int b = begin * kBlocks; b < last; ++b, to += 8 * kSliceBytes) {
      const uint8_t* block = panel + int64_t{b} * Format::kPanelBytes;
#pragma GCC unroll 8
      for (int slice = 0; slice < 8; ++slice) {
        for (int g = 0; g < 2; ++g) {
          _mm512_store_si512(to + kSliceBytes * slice + V::kBytes * g,
                             Format::template bytes<V>(block, 0, 0, slice, g));
        }
      }
    }
  }

  // Sums of a group out to y, whose panel has `left` rows.
  static void write(const ChannelRows& rows, int tokens, const uint8_t* panel, const int32_t* sums, float* y,
                    int64_t ldy, int left) {
    const V::F low = Format::template scale<V>(panel, 0, 0, 0),
               high = Format::template scale<V>(panel, 0, 0, 1);
    for (int t = 0; t < tokens; ++t, sums += kPanelRows) {
      const V::I offset = V::same(Format::kZero * rows.sum(t));
      const V::F scale = V::set1(rows.scale(t));
      alignas(64) float out[kPanelRows];
      V::store(out,
               V::mul(V::mul(V::to_float(_mm512_sub_epi32(_mm512_load_si512(sums), offset)), low), scale));
      V::store(
          out + V::kLanes,
          V::mul(V::mul(V::to_float(_mm512_sub_epi32(_mm512_load_si512(sums + V::kLanes), offset)), high),
                 scale));
      V::store_rows(out, left, y + t * ldy);
    }
  }

  static void strip(const ChannelRows& x, const TokenGroups& groups, const uint8_t* panel, int num_blocks,
                    float* y, int64_t ldy, int N) {
    const int tiles = (num_blocks * Format::kPanelColumns + kTileColumns - 1) / kTileColumns;
    const bool alone = groups.count == 1, second = groups.size > Tiles::kGroup;
    const int slice = alone && !Format::kNibbles ? tiles : kHeldTiles;
    const int64_t ahead = alone ? kAheadBytes : int64_t{kHeldTiles} * kBytesOfTile;
    alignas(64) Sums sums[kMostGroups];
    alignas(64) uint8_t unpacked[Format::kNibbles ? kHeldTiles * kTileBytes : 1];
    for (int n = 0; n < N; n += kPanelRows, panel += int64_t{num_blocks} * Format::kPanelBytes) {
      for (int begin = 0; begin < tiles; begin += slice) {
        const int end = tiles - begin < slice ? tiles : begin + slice;
        if constexpr (Format::kNibbles) unpack(panel, num_blocks, begin, end, unpacked);
        for (int g = 0; g < groups.count; ++g) {
          if (begin == 0) {
            Tiles::zero_sums(second);
          } else if (!alone) {
            Tiles::load_sums(sums[g], second);
          }
          add_tiles(x.from(groups.begin(g)), second, panel, unpacked, begin, end, g == 0 ? ahead : 0);
          if (!alone || end == tiles) Tiles::store_sums(sums[g], second);
        }
      }
      for (int g = 0; g < groups.count; ++g) {
        const int first = groups.begin(g);
        write(x.from(first), groups.size, panel, sums[g], y + first * ldy + n, ldy, N - n);
      }
    }
  }

  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    if constexpr (!T::kAnyTokenCount) {
      if (M < kFewestTokens) {
        return avx512_vnni_integer()->of(kNumberOf<Format>).matmul(x, row_bytes, panels, y, ldy, M, N, K);
      }
    }
    const int num_blocks = (K + Format::kPanelColumns - 1) / Format::kPanelColumns;
    const ChannelRows rows = ChannelRows::of(x, row_bytes, K);
    int configured = 0;
    for (int m = 0; m < M; m += kMostGroups * Tiles::kTokens) {
      const int here = M - m < kMostGroups * Tiles::kTokens ? M - m : kMostGroups * Tiles::kTokens;
      const TokenGroups groups(here, Tiles::kTokens);
      if (groups.size != configured) Tiles::configure(configured = groups.size, 64);
      strip(rows.from(m), groups, static_cast<const uint8_t*>(panels), num_blocks, y + m * ldy, ldy, N);
    }
    if (configured != 0) T::release();
  }
};

// The part of the AMX level that belongs to formats with one scale for a row.
template <class T>
constexpr void add_amx_channel(KernelTable& part) {
  for_each_format([&]<class Format>(Format) {
    if constexpr (is_per_channel<Format>) {
      part.formats[static_cast<int>(kNumberOf<Format>)] = {ActivationKind::kQ8Token,
                                                           AmxChannelProducts<T, Format>::matmul, nullptr};
    }
  });
}

}  // namespace
}  // namespace twofold::kernels
