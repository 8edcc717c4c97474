// What a tile of the integer products needs to know of a part of its activation rows besides the integers. Anonymous
// namespace: each file that includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <cstdint>

#include "folded_block.h"
#include "four_codes.h"
#include "integer_terms.h"
#include "subblock_scales.h"

namespace twofold::kernels {
namespace {

template <class V, class Dot, class Format, int kTokens>
struct TileTerms {
  using Scales = SubblockScales<V, Dot, Format>;
  static constexpr int kSubblocks = 8, kPieces = Scales::kHalves ? 2 : Dot::kPieces;
  static constexpr bool kFour = takes_four<V, Format>;
  static constexpr bool kFolds = fits_byte<Format> && requires { Dot::kFoldTiles; };
  static constexpr bool kHalfSums = takes_half_sums<Format>, kHasSubblockSums = takes_subblock_sums<Format>;

  alignas(64) int32_t zero[kTokens][kPieces * kSubblocks];  // start value of an integer sum
  alignas(64) float scale[kTokens][kSubblocks];
  alignas(64) float sum[kHasSubblockSums ? kTokens : 1][kSubblocks];  // scale * sum of the integers
  alignas(64) int32_t halves[kHalfSums ? kTokens : 1][kSubblocks];    // sums of the halves' integers
  alignas(64) int32_t in_place[kFour ? kPieces * kSubblocks : 1];     // as zero, for four_codes.h
  alignas(64) int32_t folded[kFolds ? kTokens : 1][kSubblocks];       // as zero, for folded_block.h

  // The first token's first subblock; the next token's is kSubblocks further on.
  TokenSubblock token() const { return {scale[0], sum[0], halves[0]}; }

  void fill(const Q8Rows& x, int tokens) {
    for (int t = 0; t < tokens; ++t) {
      const Q8Rows row = x.from(t, 0);
      SubblockTerms::of_scales<kHasSubblockSums>(row.sum16, row.scale, scale[t],
                                                 sum[kHasSubblockSums ? t : 0]);
      if constexpr (kHalfSums) SubblockTerms::of_halves(row.sum16, halves[t]);
      Dot::template zeros<Format::kZero, kPieces == 2>(row.q, row.sum16, zero[t]);
      if constexpr (Scales::kReads && Format::kZero != 0) SubblockTerms::add(kReadable, kPieces, zero[t]);
    }
    if constexpr (kFour) FourCodes<V, Format>::zeros(zero[0], in_place);
    if constexpr (kFolds) {
      using Block = FoldedBlock<V, Format>;
      for (int t = 0; t < tokens; ++t) {
        SubblockTerms::of_zeros<Block::kZero, false>(x.from(t, 0).sum16, folded[t]);
        if constexpr (Block::kReads && Block::kZero != 0) SubblockTerms::add(kReadable, 1, folded[t]);
      }
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
