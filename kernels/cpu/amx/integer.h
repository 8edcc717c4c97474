// The AMX level's products of q8 activations with packed integer weights, written over T (amx/tiles.h) and
// a format (twofold/formats/). The same bits as integer_products.h, whose AVX-512 products also take the
// calls with few tokens.
//
// K is cut into parts of 256 columns. A part of a panel is unpacked once into tiles of signed bytes and its
// scales into floats; then groups of up to 32 tokens pass over it. The integer sums of some subblocks (32 columns)
// leave their tiles through the first-level cache and are scaled there, because only memory connects tiles
// and vectors. That, not the products, is where the time goes: docs/notebook/kernels.md.
#pragma once
#include "amx/tiles.h"
#include "avx512/vnni_vector.h"
#include "integer_products.h"

namespace twofold::kernels {
namespace {

template <class T, class Format>
struct AmxIntegerProducts {
  using V = Avx512Vnni;
  using F = V::F;
  using Tiles = AmxTiles<T>;
  using FewTokens = IntegerProducts<V, Format>;
  using Rows = typename FewTokens::Rows;

  static constexpr bool kFolds = FewTokens::kFolds, kHalves = FewTokens::kHalves && !kFolds;
  using Kind = typename Format::Kind;
  static constexpr bool kSumsOfBlock = Kind::kSumsOfBlock;
  static constexpr int kPartSubblocks = FewTokens::kPartSubblocks, kPartBlocks = FewTokens::kPartBlocks;
  static constexpr int kSums = kHalves ? 2 : 1;      // integer sums of a subblock
  static constexpr int kTogether = kHalves ? 2 : 4;  // subblocks whose integer sums wait in the cache: 16 KiB
  static constexpr int kAlone = kSumsOfBlock ? Format::kSubblocks : 1;  // what is left over comes in so many
  static constexpr int kMostGroups = 8;          // whose sums and activations stay in the second-level cache
  static constexpr int64_t kAheadBytes = 16384;  // two parts: one is unpacked at a stroke
  static constexpr int kVectors = kPanelRows / V::kLanes;

  // Few tokens leave tiles mostly empty, and 8-bit weights from memory last as long as the products of 32
  // tokens by either level (238 us against 259; of q4_0 257 against 204; of q2_k 518 against 570 from cache).
  static constexpr bool kLate =
      Format::kPanelBytes > 1024 * Format::kSubblocks || (kFolds && takes_half_sums<Format>);
  static constexpr int kFewestTokens = T::kAnyTokenCount ? 1 : kLate ? 48 : 24;

  // A part of a panel as the tiles and the scaling read it.
  struct alignas(64) Unpacked {
    int8_t weights[kPartSubblocks][8][4 * kPanelRows];
    float scale[kPartSubblocks * kSums][kPanelRows];
    float min[takes_subblock_sums<Format> ? kPartSubblocks : 1][kPanelRows];
    float of_block[kPanelRows];  // what multiplies the scales of halves; a part is one block then
    int subblocks;

    Unpacked(const uint8_t* block, int num_blocks) : subblocks(num_blocks * Format::kSubblocks) {
      for (int b = 0; b < num_blocks; ++b, block += Format::kPanelBytes) {
#pragma GCC unroll 8
        for (int in_block = 0; in_block < Format::kSubblocks; ++in_block) {
          const int subblock = b * Format::kSubblocks + in_block;
#pragma GCC unroll 2
          for (int g = 0; g < kVectors; ++g) {
#pragma GCC unroll 8
            for (int slice = 0; slice < 8; ++slice) {
              const V::I bytes = Format::template bytes<V>(block, in_block / Format::kGroupSubblocks,
                                                           in_block % Format::kGroupSubblocks, slice, g);
              _mm512_store_si512(weights[subblock][slice] + V::kBytes * g,
                                 _mm512_sub_epi8(bytes, _mm512_set1_epi8(static_cast<char>(Format::kZero))));
            }
            const int row = V::kLanes * g;
            if constexpr (kHalves) {
              for (int half = 0; half < 2; ++half)
                V::store(scale[2 * subblock + half] + row, numbers_of<V, Format>(block, in_block, half, g));
              if (in_block == 0) V::store(of_block + row, Format::template block_scale<V>(block, g));
            } else {
              V::store(scale[subblock] + row, Format::template scale<V>(block, in_block, 0, g));
            }
            if constexpr (takes_subblock_sums<Format>)
              V::store(min[subblock] + row, Format::template min<V>(block, in_block, 0, g));
          }
        }
      }
    }
  };

  struct Folded : FoldedBlock<V, Format, true> {
    static constexpr int subblocks = Format::kSubblocks;
    Folded(const uint8_t* block, int /*num_blocks*/) : FoldedBlock<V, Format, true>(block) {}
  };
  template <bool, class Other>
  struct Either {
    using type = Other;
  };
  template <class Other>
  struct Either<true, Other> {
    using type = Folded;
  };
  using Part = typename Either<kFolds, Unpacked>::type;

  // What minima multiply: of each token's subblocks the scaled sum of the integers, or the sums of both halves' in 16 bits.
  struct alignas(64) SubblockSums {
    float scaled[takes_subblock_sums<Format> ? Tiles::kTokens : 1][kPartSubblocks];
    int32_t halves[takes_half_sums<Format> ? Tiles::kTokens : 1][kPartSubblocks];

    TokenSubblock token(const Rows& rows, int t, int subblock) const {
      return {rows.from(t, subblock).scale, scaled[takes_subblock_sums<Format> ? t : 0] + subblock,
              halves[takes_half_sums<Format> ? t : 0] + subblock};
    }
  };
  using Sums = float[Tiles::kTokens * kPanelRows];
  using Products = int32_t[kTogether * kSums][Tiles::kTokens][kPanelRows];

  // Adds what R subblocks from `subblock` on contribute to the sums of some tokens. The order of the arithmetic is
  // that of FewTokens::tile.
  template <int R>
  static void scale_and_add(const Products& products, const Part& part, int subblock, const Rows& rows,
                            int tokens, const SubblockSums& subblock_sums, float* out) {
    F c[R * kSums][kVectors];
    [[maybe_unused]] F block_scale[kVectors];
    typename Kind::template Least<V, Format> least[R][kVectors] = {};
#pragma GCC unroll 4
    for (int g = 0; g < kVectors; ++g) {
#pragma GCC unroll 8
      for (int i = 0; i < R * kSums; ++i) c[i][g] = V::load(part.scale[subblock * kSums + i] + V::kLanes * g);
      if constexpr (kHalves) block_scale[g] = V::load(part.of_block + V::kLanes * g);
      if constexpr (takes_subblock_sums<Format>) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) least[r][g].min = V::load(part.min[subblock + r] + V::kLanes * g);
      }
    }
    for (int t = 0; t < tokens; ++t, out += kPanelRows) {
      const TokenSubblock x = subblock_sums.token(rows, t, subblock);
#pragma GCC unroll 2
      for (int g = 0; g < kVectors; ++g) {
        const auto product = [&](int i) {
          return V::to_float(_mm512_load_si512(&products[i][t][V::kLanes * g]));
        };
        F total = V::load(out + V::kLanes * g);
        [[maybe_unused]] F of_block = total;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          if constexpr (kHalves) {
            const F exact = V::fma(product(2 * r + 1), c[2 * r + 1][g], V::mul(product(2 * r), c[2 * r][g]));
            total = least[r][g].join(V::mul(exact, block_scale[g]), x.at(r), total);
          } else if constexpr (kSumsOfBlock) {
            const int in_block = r % Format::kSubblocks;
            of_block = Kind::template add<V>(in_block, product(r), x.at(r), of_block);
            if (in_block + 1 < Format::kSubblocks) continue;
            total =
                Kind::template join<V, Format>(of_block, c[r][g], least[r][g].min, x.at(r - in_block), total);
          } else {
            total = least[r][g].join(V::mul(product(r), c[r][g]), x.at(r), total);
          }
        }
        V::store(out + V::kLanes * g, total);
      }
    }
  }

  // The same for a folded block.
  template <int R>
  static void add_folded(const Products& products, const Part& part, int subblock, const Rows& rows,
                         int tokens, const SubblockSums& subblock_sums, float* out) {
    const typename Part::Scales scales[kVectors] = {part.scales(0), part.scales(1)};
    for (int t = 0; t < tokens; ++t, out += kPanelRows) {
      const TokenSubblock x = subblock_sums.token(rows, t, subblock);
#pragma GCC unroll 2
      for (int g = 0; g < kVectors; ++g) {
        F total = V::load(out + V::kLanes * g);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V::I sum = _mm512_load_si512(&products[r][t][V::kLanes * g]);
          total = part.add(subblock + r, g, sum, scales[g], x.at(r), total);
        }
        V::store(out + V::kLanes * g, total);
      }
    }
  }

  // R subblocks from `subblock` on for some tokens, whose tiles are configured.
  template <int R>
  static void add_runs(const Part& part, int subblock, const Rows& rows, int tokens,
                       const SubblockSums& subblock_sums, const char* next, int lines, float* out) {
    alignas(64) Products products;
    const bool second = tokens > Tiles::kGroup;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < lines; ++i, next += 64) V::prefetch(next);
      const int8_t* x = rows.from(0, subblock + r).q;
      const uint8_t* weights = reinterpret_cast<const uint8_t*>(part.weights[subblock + r]);
#pragma GCC unroll 2
      for (int half = 0; half < kSums; ++half) {
        Tiles::zero_sums(second);
        Tiles::multiply(x + 16 * half, rows.row_bytes, weights + 512 * half, second, AddInt8());
        Tiles::store_sums(products[r * kSums + half], second);
      }
    }
    if constexpr (kFolds) {
      add_folded<R>(products, part, subblock, rows, tokens, subblock_sums, out);
    } else {
      scale_and_add<R>(products, part, subblock, rows, tokens, subblock_sums, out);
    }
  }

  struct AddInt8 {
    template <int C, int A, int B>
    void operator()() const {
      T::template add_int8<C, A, B>();
    }
  };

  // A part of a panel against a group of tokens; meanwhile `lines` cache lines a subblock are fetched from `next`.
  static void group(const Part& part, const Rows& rows, int tokens, const char* next, int lines, float* out) {
    SubblockSums subblock_sums;
    for (int t = 0; t < tokens && Format::kMin; ++t) {
      const Rows row = rows.from(t, 0);
      alignas(64) float scales[kPartSubblocks];
      if constexpr (takes_subblock_sums<Format>) {
        SubblockTerms::of_scales<true>(row.sum16, row.scale, scales, subblock_sums.scaled[t]);
      } else if constexpr (takes_half_sums<Format>) {
        SubblockTerms::of_halves(row.sum16, subblock_sums.halves[t]);
      }
    }
    int subblock = 0;
    for (; subblock + kTogether <= part.subblocks;
         subblock += kTogether, next += int64_t{64} * lines * kTogether) {
      add_runs<kTogether>(part, subblock, rows, tokens, subblock_sums, next, lines, out);
    }
    for (; subblock < part.subblocks; subblock += kAlone, next += int64_t{64} * lines * kAlone) {
      add_runs<kAlone>(part, subblock, rows, tokens, subblock_sums, next, lines, out);
    }
  }

  // A panel against some groups of activation rows.
  static void panel(const Rows& x, const TokenGroups& groups, const uint8_t* blocks, int num_blocks,
                    Sums* sums) {
    const int lines = (Format::kPanelBytes / Format::kSubblocks + 63) / 64 / groups.count + 1;
    for (int b = 0; b < num_blocks; b += kPartBlocks) {
      const uint8_t* block = blocks + static_cast<int64_t>(b) * Format::kPanelBytes;
      const char* next = reinterpret_cast<const char*>(block) + kAheadBytes;
      const Part part(block, num_blocks - b < kPartBlocks ? num_blocks - b : kPartBlocks);
      const int64_t subblock = static_cast<int64_t>(b) * Format::kSubblocks;
      for (int g = 0; g < groups.count; ++g, next += int64_t{64} * lines * part.subblocks) {
        group(part, x.from(groups.begin(g), subblock), groups.size, next, lines, sums[g]);
      }
    }
  }

  static void strip(const Rows& x, const TokenGroups& groups, const uint8_t* blocks, int num_blocks, float* y,
                    int64_t ldy, int N) {
    alignas(64) Sums sums[kMostGroups];
    for (int n = 0; n < N; n += kPanelRows, blocks += int64_t{num_blocks} * Format::kPanelBytes) {
      for (int g = 0; g < groups.count; ++g) {
        for (int i = 0; i < kPanelRows * groups.size; i += V::kLanes) V::store(sums[g] + i, V::set1(0.0F));
      }
      panel(x, groups, blocks, num_blocks, sums);
      const int rows = N - n < kPanelRows ? N - n : kPanelRows;
      for (int g = 0; g < groups.count; ++g) {
        float* to = y + groups.begin(g) * ldy + n;
        for (int t = 0; t < groups.size; ++t) V::store_rows(sums[g] + kPanelRows * t, rows, to + t * ldy);
      }
    }
  }

  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    if constexpr (!T::kAnyTokenCount) {
      // By its pointer: compiled here again, that code would take as long as all the rest of this file.
      if (M < kFewestTokens) {
        return avx512_vnni_integer()->of(kNumberOf<Format>).matmul(x, row_bytes, panels, y, ldy, M, N, K);
      }
    }
    const int num_blocks = (K + Format::kPanelColumns - 1) / Format::kPanelColumns;
    int configured = 0;
    for (int m = 0; m < M; m += kMostGroups * Tiles::kTokens) {
      const int here = M - m < kMostGroups * Tiles::kTokens ? M - m : kMostGroups * Tiles::kTokens;
      const TokenGroups groups(here, Tiles::kTokens);
      if (groups.size != configured) Tiles::configure(configured = groups.size, 32 / kSums);
      strip(Rows::of(x, row_bytes, K).from(m, 0), groups, static_cast<const uint8_t*>(panels), num_blocks,
            y + m * ldy, ldy, N);
    }
    if (configured != 0) T::release();
  }
};

// The integer formats' part of the AMX level.
template <class T>
constexpr void add_amx_integer(KernelTable& part) {
  for_each_format([&]<class Format>(Format) {
    if constexpr (is_integer<Format> && !is_per_channel<Format>) {
      part.formats[static_cast<int>(kNumberOf<Format>)] = {ActivationKind::kQ8,
                                                           AmxIntegerProducts<T, Format>::matmul, nullptr};
    }
  });
}

}  // namespace
}  // namespace twofold::kernels
