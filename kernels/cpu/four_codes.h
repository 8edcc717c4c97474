// One activation row against formats whose slices hold four codes in a byte and whose halves have scales (fits_byte): all four
// subblocks at once, so that a slice is loaded and shifted once and its codes are multiplied where they lie in the byte. What
// a place adds, a power of two, is taken off the scale: the same bits as integer_products.h. Anonymous namespace: each
// file that includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <cstdint>

#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

// V::Four<Format> supplies:
//   kVectors       of rows taken at once
//   kUp[4]         f of a subblock is so many powers of two larger than its sums times the integers of its scales
//   zero(subblock, v)   what sums of this subblock begin with, v being what those of integer_products.h do
//   sums(block, group, g, x, zero, f)   of the group's four subblocks and the rows from vector g on
template <class V, class Format>
inline constexpr bool takes_four = false;
template <class V, class Format>
  requires fits_byte<Format> && requires { V::template Four<Format>::kVectors; }
inline constexpr bool takes_four<V, Format> = true;

template <class V, class Format>
struct FourCodes {
  using F = typename V::F;
  using Four = typename V::template Four<Format>;
  static constexpr int kG = Four::kVectors, kPasses = kPanelRows / V::kLanes / kG;
  static constexpr int kLines =
      (Format::kPanelBytes / 64 + kPasses * 8 - 1) / (kPasses * 8);  // for a pass and subblock
  using Least = typename Format::Kind::template Least<V, Format>;

  static void zeros(const int32_t* zero, int32_t* in_place) {
    for (int i = 0; i < 16 && Format::kZero != 0; ++i) in_place[i] = Four::zero(i / 2 % 4, zero[i]);
  }

  // A block of 256 columns. Terms and Part: of IntegerProducts.
  template <class Part, class Terms>
  [[gnu::noinline]] static void block(const Part& part, const int8_t* x, const Terms& terms, float* out) {
    const uint8_t* const block = part.block;
    const TokenSubblock token = terms.token();
    const char* next = part.next;
    for (int pass = 0; pass < kPasses; ++pass, next += 64 * 8 * kLines) {
      const int g0 = pass * kG;
      F acc[kG], c[kG][4];
#pragma GCC unroll 2
      for (int g = 0; g < kG; ++g) {
        acc[g] = V::load(out + V::kLanes * (g0 + g));
        const F whole = Format::template block_scale<V>(block, g0 + g);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r)
          c[g][r] = V::mul(whole, V::set1(1.0f / static_cast<float>(1 << Four::kUp[r])));
      }
      for (int group = 0; group < 2; ++group) {
        for (int i = 0; i < 4 * kLines; ++i) V::prefetch(next + 64 * (4 * kLines * group + i));
        F f[4][kG];
        Four::sums(block, group, g0, x + 128 * group, terms.in_place + 8 * group, f);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          const int subblock = 4 * group + r;
#pragma GCC unroll 2
          for (int g = 0; g < kG; ++g) {
            acc[g] =
                Least::of(block, subblock, g0 + g).join(V::mul(f[r][g], c[g][r]), token.at(subblock), acc[g]);
          }
        }
      }
#pragma GCC unroll 2
      for (int g = 0; g < kG; ++g) V::store(out + V::kLanes * (g0 + g), acc[g]);
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
