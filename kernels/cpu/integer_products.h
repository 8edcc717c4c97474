// Products of q8 activations with the panels of integer formats, written once over a vector type V and a
// format (twofold/formats/).
//
// K is cut into parts of 256 columns. A part of a panel (32 rows) stays in the first-level cache while tiles
// with a few activation rows pass over it; a tile's integer sums are registers, its float sums pass from part
// to part through a small buffer. Integer sums start at the correction for the offset of unsigned weights.
#pragma once
#include <cstdint>

#include "amx/tile_terms.h"
#include "channel_products.h"
#include "folded_block.h"
#include "four_codes.h"
#include "integer_terms.h"
#include "levels.h"
#include "subblock_scales.h"
#include "unpack_panel.h"
#include "unpacked_block.h"

namespace twofold::kernels {
namespace {

template <class V, class Format>
struct IntegerProducts {
  using I = typename V::I;
  using F = typename V::F;
  using Dot = typename DotOf<V, Format>::type;
  using InCache = Unpacked<V, Dot, Format>;

  using Scales = SubblockScales<V, Dot, Format>;
  using Kind = typename Format::Kind;
  static constexpr bool kHalves = Scales::kHalves, kReads = Scales::kReads;
  static constexpr int kPieces = kHalves ? 2 : Dot::kPieces;  // integer sums of a subblock
  static constexpr int kTokens = Dot::tokens(kPieces);        // activation rows of a tile
  static constexpr int kPartSubblocks = 8;
  static constexpr int kPartBlocks = kPartSubblocks / Format::kSubblocks;
  static constexpr int kChunk = 64;    // activation rows whose float sums are held
  static constexpr int kStrip = 192;   // activation rows that stay in the second-level cache
  static constexpr int kTerms = 256;   // tiles' parts whose terms are held
  static constexpr int kUnpackTiles =  // tiles of activations for which to unpack a part; 0: never
      Dot::unpack_tiles(Format::kCodes);
  static constexpr int kFewPanels = 2;                  // for which holding them is not worth it
  static constexpr bool kFour = takes_four<V, Format>;  // subblocks at once, for one row of activations
  static constexpr bool kFolds = fits_byte<Format> && requires { Dot::kFoldTiles; };  // for many rows
  static constexpr int64_t kAheadBytes = 16384;                                       // prefetched
  static_assert(kPartSubblocks % Format::kSubblocks == 0, "panel blocks are cut into no parts");
  // Tiles of activations from which on a part is multiplied from the cache.
  static constexpr int kCacheTiles = [] {
    if constexpr (kFolds) return Dot::kFoldTiles;
    return kUnpackTiles;
  }();
  // Activation rows of a tile where there are at most 2 * kTokens.
  static constexpr int kFewTokens = [] {
    if constexpr (requires { Dot::few_tokens(Format::kCodes); }) {
      if (Dot::few_tokens(Format::kCodes) < kTokens) return Dot::few_tokens(Format::kCodes);
    }
    return kTokens;
  }();
  // Activation rows of the smallest tile where a chunk has `tiles` of them, or more (tile_end).
  static constexpr int fewest(int tiles) { return ((tiles - 1) * kFewTokens + 1) / tiles; }

  using Terms = TileTerms<V, Dot, Format, kTokens>;
  using Rows = Q8Rows;
  using Part = PanelPart;

  // The exact integer sums of a subblock as floats, times the integers of its scales where the format has such; if kReads and
  // there are none, as SubblockScales reads them. `weights` is the subblock in the cache or the block it belongs to, from vector
  // of rows g0 on.
  template <bool kInCache, int T, int G, class ScalesOf>
  [[gnu::always_inline]] static void subblock_sums(const uint8_t* weights, const ScalesOf& scales, int group,
                                                   int in_group, int g0, const int8_t* const* x,
                                                   const int32_t* zero, F (&f)[T][G]) {
    const int subblock = Format::kGroupSubblocks * group + in_group;
    // Loaded again for each subblock: kept over those that share them, slices push sums out of 16 registers.
    constexpr bool kAgain =
        Format::kUnitSubblocks == 4 || (Format::kUnitSubblocks == 2 && T == 1 && V::kLanes == 8);
    constexpr bool kOfUnit = !kInCache && kAgain;
    if constexpr (kOfUnit) {
      weights += group * Format::kUnitBytes;
      __asm__("" : "+r"(weights));
    }
    const int at_group = kOfUnit ? 0 : group;
    typename Dot::Total totals[T][G];
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces; ++piece) {
      typename Dot::Sum sums[T][G];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
          sums[t][g] = Scales::begin(zero + kPieces * kPartSubblocks * t + piece, piece);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8 / kPieces; ++i) {
        const int slice = 8 / kPieces * piece + i;
        typename Dot::Weights w[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          if constexpr (kInCache) {
            w[g] = Dot::load(weights + InCache::at(slice, g));
          } else {
            w[g] = weights_of<V, Dot, Format>(weights, at_group, in_group, slice, g);
          }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const I values = V::broadcast(x[t] + 4 * slice);
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) Dot::add(sums[t][g], w[g], values);
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const auto by = Scales::factor(scales, subblock, piece, g0 + g);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) Scales::add(piece, sums[t][g], by, totals[t][g]);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) f[t][g] = Dot::value(totals[t][g]);
    }
  }

  // The float sums of a tile: registers if the integer sums leave room, else in the first-level cache.
  template <int T, int G, bool kHeld>
  struct TileSums {
    float* home;
    F acc[kHeld ? T : 1][G];

    [[gnu::always_inline]] float* at(int t, int g) const { return home + kPanelRows * t + V::kLanes * g; }
    [[gnu::always_inline]] F get(int t, int g) const {
      if constexpr (kHeld) return acc[t][g];
      return V::load(at(t, g));
    }
    [[gnu::always_inline]] void put(int t, int g, F v) {
      if constexpr (kHeld) {
        acc[t][g] = v;
      } else {
        V::store(at(t, g), v);
      }
    }
    template <class Each>
    [[gnu::always_inline]] static void for_all(const Each& each) {
#pragma GCC unroll 8
      for (int t = 0; t < T && kHeld; ++t) {
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) each(t, g);
      }
    }
  };

  // Adds a block's own sums to those of its rows. x: its first subblock.
  template <int T, int G, class Sums>
  [[gnu::always_inline]] static void add_block(const uint8_t* block, const Sums& sums, const TokenSubblock& x,
                                               int g0, float* out) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const F scale = Format::template scale<V>(block, 0, 0, g0 + g);
      const F least = Format::template min<V>(block, 0, 0, g0 + g);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        float* to = out + kPanelRows * t + V::kLanes * (g0 + g);
        const TokenSubblock first = x.at(kPartSubblocks * t);
        V::store(to, Kind::template join<V, Format>(sums.get(t, g), scale, least, first, V::load(to)));
      }
    }
  }

  // T activation rows against some blocks of a panel, G vectors of its rows.
  template <bool kInCache, int T, int G>
  static void tile(const Rows& rows, const Part& part, const Terms& terms, int g0, float* out) {
    constexpr bool kOwnSums = Kind::kSumsOfBlock;  // sums of the block are added to the row's at its end
    constexpr bool kHeld = T <= Dot::held(kPieces);
    alignas(64) float block_sums[kOwnSums && !kHeld ? T * kPanelRows : 1];
    TileSums<T, G, kHeld> sums;
    sums.home = (kOwnSums && !kHeld ? block_sums : out) + V::kLanes * g0;
    if constexpr (!kOwnSums) sums.for_all([&](int t, int g) { sums.acc[t][g] = V::load(sums.at(t, g)); });
    const int8_t* x[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) x[t] = rows.q + t * rows.row_bytes;
    const uint8_t* block = part.block;
    const InCache* const cached = reinterpret_cast<const InCache*>(part.bytes);
    const uint8_t* bytes = kInCache ? cached->weights + InCache::at(0, g0) : nullptr;
    const int num_blocks = part.num_blocks, lines = part.lines;
    const char* next = part.next;
    TokenSubblock token = terms.token();
    const int32_t* zero = terms.zero[0];
    for (int b = 0; b < num_blocks; ++b, block += Format::kPanelBytes) {
      const auto scales = [&] {
        if constexpr (kInCache) {
          return cached->scales(b, block);
        } else {
          return Scales{block};
        }
      }();
#pragma GCC unroll 2
      for (int group = 0; group < Format::kSubblocks / Format::kGroupSubblocks; ++group) {
#pragma GCC unroll 4
        for (int in_group = 0; in_group < Format::kGroupSubblocks; ++in_group) {
          const int subblock = Format::kGroupSubblocks * group + in_group;
          for (int i = 0; i < lines; ++i, next += 64) V::prefetch(next);
          F f[T][G];
          subblock_sums<kInCache, T, G>(kInCache ? bytes : block + V::kBytes * g0, scales, group, in_group,
                                        g0, x, zero, f);
          if constexpr (kInCache) bytes += InCache::kSubblockBytes;
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) {
            if constexpr (kOwnSums) {
#pragma GCC unroll 8
              for (int t = 0; t < T; ++t)
                sums.put(
                    t, g,
                    Kind::template add<V>(subblock, f[t][g], token.at(kPartSubblocks * t), sums.get(t, g)));
            } else {
              const auto by = scales.of_run(subblock, g0 + g);
#pragma GCC unroll 8
              for (int t = 0; t < T; ++t)
                sums.put(t, g, by.add(f[t][g], token.at(kPartSubblocks * t), sums.get(t, g)));
            }
          }
          zero += kPieces;
          token = token.at(1);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) x[t] += 32;
        }
      }
      if constexpr (kOwnSums) add_block<T, G>(block, sums, token.at(-Format::kSubblocks), g0, out);
    }
    if constexpr (!kOwnSums) sums.for_all([&](int t, int g) { V::store(sums.at(t, g), sums.acc[t][g]); });
  }

  // The same as a call of its own: inlined into one function per format, all tiles together take the compiler half as long
  // again. With halves' scales many rows on AVX2 are a fifth slower that way (q2_k), so those stay inlined.
  template <bool kInCache, int T, int G>
  [[gnu::noinline]] static void called_tile(const Rows& rows, const Part& part, const Terms& terms, int g0,
                                            float* out) {
    tile<kInCache, T, G>(rows, part, terms, g0, out);
  }

  template <bool kInCache, int T>
  static void tile_passes(const Rows& x, Part part, const Terms& terms, float* out) {
    constexpr int kVectors = Dot::vectors(T, kPieces);  // in a pass
    for (int g = 0; g < kPanelRows / V::kLanes; g += kVectors) {
      if constexpr (kFolds && kInCache) {
        FoldedTile<V, Dot, Format, T, kVectors>::multiply(x, part, terms, g, out);
      } else if constexpr (kHalves) {
        tile<kInCache, T, kVectors>(x, part, terms, g, out);
      } else {
        called_tile<kInCache, T, kVectors>(x, part, terms, g, out);
      }
      part.lines = 0;
    }
  }

  // T or fewer activation rows; tiles of fewer rows than any chunk is cut into are not compiled.
  template <bool kInCache, int T = kTokens>
  static void tile_tokens(int tokens, const Rows& x, const Part& part, const Terms& terms, float* out) {
    if constexpr (T > fewest(kInCache ? kCacheTiles : 1)) {
      if (tokens < T) return tile_tokens<kInCache, T - 1>(tokens, x, part, terms, out);
    }
    if constexpr (kFour && !kInCache && T == 1) {
      FourCodes<V, Format>::block(part, x.q, terms, out);
    } else {
      tile_passes<kInCache, T>(x, part, terms, out);
    }
  }

  // Tiles of a chunk of `tokens` rows: as even as possible.
  static int num_tiles(int tokens) {
    const int most = tokens > 2 * kTokens ? kTokens : kFewTokens;
    return (tokens + most - 1) / most;
  }
  static int tile_end(int tokens, int tile) { return tokens * (tile + 1) / num_tiles(tokens); }

  // A chunk of activation rows against a part of one panel; out are the float sums. `held` are the terms of
  // each tile, `separate` from one another; null: they are made here.
  template <bool kInCache>
  static void all_tiles(const Rows& x, int tokens, const Terms* held, int64_t separate, Part part,
                        float* out) {
    Terms own;
    const int tiles = num_tiles(tokens);
    for (int tile = 0, m = 0; tile < tiles; ++tile) {
      const int end = tile_end(tokens, tile);
      const Rows rows = x.from(m, 0);
      if (held == nullptr) own.fill(rows, end - m);
      tile_tokens<kInCache>(end - m, rows, part, held == nullptr ? own : held[tile * separate],
                            out + kPanelRows * m);
      part.next += static_cast<int64_t>(64) * part.num_blocks * Format::kSubblocks * part.lines;
      m = end;
    }
  }

  // The same for all parts of a slab's columns of the panel. Meanwhile what is multiplied next is prefetched: behind the
  // slab's columns those of the next panel.
  static void panel(const Rows& x, int tokens, const Terms* held, int64_t separate, const uint8_t* blocks,
                    int num_blocks, int64_t panel_bytes, float* out) {
    const int64_t slab_bytes = int64_t{num_blocks} * Format::kPanelBytes;
    const int tiles = num_tiles(tokens);
    constexpr int kSubblockLines = (Format::kPanelBytes / Format::kSubblocks + 63) / 64;
    const int lines = (kSubblockLines + tiles - 1) / tiles;
    for (int b = 0; b < num_blocks; b += kPartBlocks) {
      const int n = num_blocks - b < kPartBlocks ? num_blocks - b : kPartBlocks;
      const int64_t at = int64_t{b} * Format::kPanelBytes, ahead = at + kAheadBytes;
      const uint8_t* block = blocks + at;
      const char* next =
          reinterpret_cast<const char*>(blocks) + ahead + (ahead < slab_bytes ? 0 : panel_bytes - slab_bytes);
      const Rows rows = x.from(0, static_cast<int64_t>(b) * Format::kSubblocks);
      const Terms* terms = held == nullptr ? nullptr : held + b / kPartBlocks;
      if constexpr (kFolds) {
        if (tiles >= kCacheTiles) {
          FoldedBlock<V, Format> folded(block);
          all_tiles<true>(rows, tokens, terms, separate,
                          Part{block, n, reinterpret_cast<uint8_t*>(&folded), next, lines}, out);
          continue;
        }
      } else if constexpr (kUnpackTiles > 0) {
        if (tiles >= kCacheTiles) {
          InCache cached(block, n);
          all_tiles<true>(rows, tokens, terms, separate,
                          Part{block, n, reinterpret_cast<uint8_t*>(&cached), next, lines}, out);
          continue;
        }
      }
      all_tiles<false>(rows, tokens, terms, separate, Part{block, n, nullptr, next, lines}, out);
    }
  }

  // Chunks of a strip of M rows: as even as possible.
  static int num_chunks(int M) { return (M + kChunk - 1) / kChunk; }
  static int chunk_end(int M, int chunk) { return M * (chunk + 1) / num_chunks(M); }

  // Terms of a strip: those of a tile's parts one after the other, tile after tile.
  static void hold(const Rows& x, int M, int parts, Terms* held) {
    for (int c = 0, m = 0; c < num_chunks(M); ++c) {
      const int begin = m, tokens = chunk_end(M, c) - m;
      for (int tile = 0; tile < num_tiles(tokens); ++tile) {
        const int end = begin + tile_end(tokens, tile);
        for (int part = 0; part < parts; ++part) (held++)->fill(x.from(m, kPartSubblocks * part), end - m);
        m = end;
      }
    }
  }

  // Some columns of a strip of activation rows against all rows of the weights; `begins`: y is not there yet.
  static void slab(const Rows& x, int M, const Terms* held, const uint8_t* blocks, int num_blocks,
                   int64_t panel_bytes, float* y, int64_t ldy, int N, bool begins) {
    const int64_t parts = (num_blocks + kPartBlocks - 1) / kPartBlocks;
    alignas(64) float out[kChunk * kPanelRows];
    for (int n = 0; n < N; n += kPanelRows, blocks += panel_bytes) {
      const int rows = N - n < kPanelRows ? N - n : kPanelRows;
      const Terms* terms = held;
      for (int c = 0, m = 0; c < num_chunks(M); ++c) {
        const int end = chunk_end(M, c);
        float* to = y + m * ldy + n;
        if (begins) {
          // No masked loads: those of no lanes wait for memory too.
          for (int i = 0; i < kPanelRows * (end - m); i += V::kLanes) V::store(out + i, V::set1(0.0f));
        } else {
          for (int t = 0; t < end - m; ++t) V::load_rows(to + t * ldy, rows, out + kPanelRows * t);
        }
        for (int t = 0; t < end - m; ++t) {  // where the sums go: storing them will not wait either
          V::prefetch(to + t * ldy);
          V::prefetch(to + t * ldy + 16);
        }
        panel(x.from(m, 0), end - m, terms, parts, blocks, num_blocks, panel_bytes, out);
        for (int t = 0; t < end - m; ++t) V::store_rows(out + kPanelRows * t, rows, to + t * ldy);
        if (held != nullptr) terms += num_tiles(end - m) * parts;
        m = end;
      }
    }
  }

  static void matmul_few_panels(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy,
                                int M, int N, int K) {
    const int num_blocks = (K + Format::kPanelColumns - 1) / Format::kPanelColumns;
    for (int m = 0; m < M; m += kStrip) {
      slab(Rows::of(x, row_bytes, K).from(m, 0), M - m < kStrip ? M - m : kStrip, nullptr,
           static_cast<const uint8_t*>(panels), num_blocks, int64_t{num_blocks} * Format::kPanelBytes,
           y + m * ldy, ldy, N, true);
    }
  }

  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    if (N <= kFewPanels * kPanelRows) return matmul_few_panels(x, row_bytes, panels, y, ldy, M, N, K);
    const int num_blocks = (K + Format::kPanelColumns - 1) / Format::kPanelColumns;
    Terms held[kTerms];
    for (int m = 0; m < M; m += kStrip) {
      const int tokens = M - m < kStrip ? M - m : kStrip;
      int tiles = 0;
      for (int c = 0, begin = 0; c < num_chunks(tokens); begin = chunk_end(tokens, c), ++c) {
        tiles += num_tiles(chunk_end(tokens, c) - begin);
      }
      const int most = kTerms / tiles * kPartBlocks;
      for (int b = 0; b < num_blocks || b == 0; b += most) {
        const int n = num_blocks - b < most ? num_blocks - b : most;
        const Rows rows = Rows::of(x, row_bytes, K).from(m, static_cast<int64_t>(b) * Format::kSubblocks);
        hold(rows, tokens, (n + kPartBlocks - 1) / kPartBlocks, held);
        slab(rows, tokens, held, static_cast<const uint8_t*>(panels) + int64_t{b} * Format::kPanelBytes, n,
             int64_t{num_blocks} * Format::kPanelBytes, y + m * ldy, ldy, N, b == 0);
      }
    }
  }
};

// The integer formats' part of a level.
template <class V>
constexpr KernelTable integer_part() {
  KernelTable part;
  for_each_format([&]<class Format>(Format) {
    FormatKernels& kernels = part.formats[static_cast<int>(kNumberOf<Format>)];
    if constexpr (is_per_channel<Format>) {
      kernels = {ActivationKind::kQ8Token, ChannelProducts<V, Format>::matmul, nullptr};
    } else if constexpr (is_integer<Format>) {
      kernels = {ActivationKind::kQ8, IntegerProducts<V, Format>::matmul, nullptr};
    }
  });
  add_unpacking<V, true>(part);
  return part;
}

}  // namespace
}  // namespace twofold::kernels
