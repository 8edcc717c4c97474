// How integer_products.h sums where an instruction adds products of bytes to 32 bits: a subblock is one sum, which
// begins with what the weights' offset takes away. Scales are multiplied as floats. Anonymous namespace: each
// file that includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <cstdint>

#include "integer_terms.h"
#include "subblock_scales.h"
#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

template <class V>
struct SumsOf32 {
  using Sum = typename V::I;
  using Weights = typename V::I;
  using Total = typename V::F;
  static constexpr bool kIntegerScales = false;
  static constexpr int kPieces = 1;
  static constexpr int kStoredVectors = 1;
  static constexpr int kFoldTiles = 2;  // of activations, for which folded_block.h pays

  template <int kZero, bool kHalves>
  static void zeros(const int8_t*, const int32_t* sum16, int32_t* zero) {
    SubblockTerms::of_zeros<kZero, kHalves>(sum16, zero);
  }
  static Sum begin(const int32_t* zero) { return V::same(*zero); }
  static Sum none() { return V::same(0); }
  static Sum readable() { return V::same(kReadable); }
  static Weights weights(typename V::I bytes) { return bytes; }
  static Weights load(const uint8_t* stored) { return V::load(stored); }
  static void store(uint8_t* stored, Weights w) { V::store(stored, w); }

  struct One {};
  static One one() { return {}; }
  using Numbers = V;
  static Total first(Sum sum, One) { return V::to_float(sum); }
  static Total first(Sum sum, Total c) { return V::mul(V::to_float(sum), c); }
  static Total next(Total total, Sum, One) { return total; }
  static Total next(Total total, Sum sum, Total c) { return V::fma(V::to_float(sum), c, total); }
  static Total value(Total total) { return total; }
};

// For channel_products.h; a level adds kTokens, vectors() and add().
template <class V>
struct ChannelOf32 {
  using Run = typename V::I;
  using Weights = typename V::I;
  static Weights weights(typename V::I bytes) { return bytes; }
  static Run begin(typename V::I sum) { return sum; }
  static typename V::I end(typename V::I, Run subblock) { return subblock; }
};

// For four_codes.h: codes are multiplied where they lie, of the third bits where two shifts of a plane bring them.
template <class V, class Format, int kVectorsAtOnce>
struct FourOf32 {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int kVectors = kVectorsAtOnce;
  static constexpr bool kThird = Format::kPlanes > 0;
  static constexpr int kPlace[4] = {0, 2, kThird ? 2 : 4,
                                    kThird ? 4 : 6};  // where a subblock's lowest bit is
  // 16 bits hold a half's sum times four, not times 16.
  static constexpr int kUp[4] = {0, 2, 2, kThird ? 4 : 2};

  static int32_t zero(int subblock, int32_t v) { return v << kPlace[subblock]; }

  static void sums(const uint8_t* block, int group, int g0, const int8_t* x, const int32_t* zero,
                   F (&f)[4][kVectors]) {
    const uint8_t* slices = block + Format::slices_at(0) + group * Format::kUnitBytes + V::kBytes * g0;
    const uint8_t* planes = block + Format::planes_at(0) + group * Format::kUnitBytes + V::kBytes * g0;
    I sum[2][4][kVectors];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kVectors; ++g) sum[half][r][g] = V::same(kThird ? zero[2 * r + half] : 0);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int slice = 4 * half + i;
        I w[kVectors][4];
#pragma GCC unroll 4
        for (int g = 0; g < kVectors; ++g) {
          const I low = V::load(slices + kSliceBytes * slice + V::kBytes * g);
          if constexpr (kThird) {
            const I plane = V::load(planes + Format::plane_at(0, slice) + V::kBytes * g);
            const I high = V::template moved<2>(low);
            const I a = slice % 2 == 0 ? V::template moved<-2>(plane) : V::template moved<2>(plane);
            const I b = slice % 2 == 0 ? V::template moved<-3>(plane) : V::template moved<1>(plane);
            w[g][0] = V::template with_bits<4>(V::template bits<3>(low), a);
            w[g][1] = V::template with_bits<16>(V::template bits<12>(low), b);
            w[g][2] = V::template with_bits<16>(V::template bits<12>(high), a);
            w[g][3] = V::template with_bits<64>(V::template bits<48>(high), b);
          } else {
            w[g][0] = V::template bits<3>(low);
            w[g][1] = V::template bits<12>(low);
            w[g][2] = V::template bits<48>(low);
            w[g][3] = V::template bits<192>(low);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          const I values = V::broadcast(x + 32 * r + 4 * slice);
#pragma GCC unroll 4
          for (int g = 0; g < kVectors; ++g)
            V::template Dot<Format::kDotBits>::add(sum[half][r][g], w[g][r], values);
        }
      }
    }
    scaled<0>(block, group, g0, sum, f);
    scaled<1>(block, group, g0, sum, f);
    scaled<2>(block, group, g0, sum, f);
    scaled<3>(block, group, g0, sum, f);
  }

 private:
  template <int r>
  static void scaled(const uint8_t* block, int group, int g0, const I (&sum)[2][4][kVectors],
                     F (&f)[4][kVectors]) {
    const int subblock = 4 * group + r;
#pragma GCC unroll 4
    for (int g = 0; g < kVectors; ++g) {
      const I first = sum[0][r][g], second = sum[1][r][g];
      if constexpr (requires { requires Format::Sub::kRowBytes == 2; }) {
        const I pairs = V::template joined<kPlace[r] - kUp[r]>(first, second);
        const I scales = V::low_pairs(block + Format::sub_at(subblock, 0) + 2 * V::kLanes * (g0 + g));
        f[r][g] = V::to_float(V::pair_products(pairs, scales));
      } else {
        const auto number = [&](int half) { return numbers_of<V, Format>(block, subblock, half, g0 + g); };
        f[r][g] = V::fma(V::to_float(second), number(1), V::mul(V::to_float(first), number(0)));
      }
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
