// A block of a panel of 2 or 3 bits whose weights times the integers of their scales lie in the first-level cache, for many
// tokens: these products fit a byte (fits_byte), so that a subblock has one sum of integers and not one for each half,
// and two conversions, a product and an addition per token become one conversion. Sums of integers are exact:
// the same bits as integer_products.h. Anonymous namespace: each file that includes this is compiled with flags of its
// own and must not share code with another.
#pragma once
#include <cstdint>

#include "subblock_scales.h"
#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

// kSigned: bytes are signed, else unsigned with kZero added.
template <class V, class Format, bool kSigned = false>
struct alignas(64) FoldedBlock {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int kSubblocks = Format::kSubblocks, kVectors = kPanelRows / V::kLanes;
  static constexpr bool kMins = Format::kMin;
  // A signed scale times an offset weight is 128 at most, one more than a byte holds: its negative, plus 128.
  static constexpr bool kNegative = Format::kZero != 0;
  static constexpr int kZero = kNegative ? 128 : 0;
  static constexpr bool kReads = !kSigned;  // sums as run_scales.h has them; those of tiles begin with zero

  uint8_t weights[kSubblocks][8][kSliceBytes];
  float scale[kPanelRows];
  float less[kPanelRows];
  float min[kPanelRows];
  int32_t mins[kMins ? kSubblocks : 1][kPanelRows];  // numbers of a subblock's halves, 16 bits each

  explicit FoldedBlock(const uint8_t* block) {
    for (int g = 0; g < kVectors; ++g) {
      const int row = V::kLanes * g;
      const F of_rows = Format::template block_scale<V>(block, g);
      V::store(scale + row, of_rows);
      V::store(less + row, V::mul(of_rows, V::set1(-kReadableFloat)));
      if constexpr (kMins) V::store(min + row, Format::template block_min<V>(block, g));
#pragma GCC unroll 8
      for (int subblock = 0; subblock < kSubblocks; ++subblock) {
        if constexpr (kMins) {
          V::store(reinterpret_cast<uint8_t*>(mins[subblock] + row),
                   V::high_pairs(block + Format::sub_at(subblock, 0) + 2 * row));
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const F number = numbers_of<V, Format>(block, subblock, half, g);
          // The two bytes in each row's two 16-bit halves are multiplied: neither product carries into the other's byte
          // once begin() is added.
          const I factor = V::twice(kNegative ? V::negative(number) : number), none = begin(factor);
#pragma GCC unroll 4
          for (int slice = 4 * half; slice < 4 * half + 4; ++slice) {
            const I u = Format::template codes<V>(block, subblock / Format::kGroupSubblocks,
                                                  subblock % Format::kGroupSubblocks, slice, g);
            I w = V::times_plus(u, factor, none);
            if constexpr (kSigned && kZero != 0) w = V::other_sign(w);
            V::store(weights[subblock][slice] + V::kBytes * g, w);
          }
        }
      }
    }
  }

  // What multiplies the sums of a vector of rows.
  struct Scales {
    F scale, less, min;
  };
  Scales scales(int g) const {
    Scales of_rows{V::load(scale + V::kLanes * g), V::load(less + V::kLanes * g), F()};
    if constexpr (kMins) of_rows.min = V::load(min + V::kLanes * g);
    return of_rows;
  }
  // Adds a subblock's sum of integers to `total`.
  [[gnu::always_inline]] F add(int subblock, int g, I sum, const Scales& by, const TokenSubblock& x,
                               F total) const {
    F of_run = kReads ? V::fma(V::as_float(sum), by.scale, by.less) : V::mul(V::to_float(sum), by.scale);
    if constexpr (kMins) {
      const I least = V::load(reinterpret_cast<const uint8_t*>(mins[subblock] + V::kLanes * g));
      of_run = V::fma(V::to_float(V::pair_products(least, V::same(*x.halves))), by.min, of_run);
    }
    const F x_scale = V::set1(*x.scale);
    return kNegative ? V::minus_product(of_run, x_scale, total) : V::fma(of_run, x_scale, total);
  }

 private:
  static I begin(I factor) {  // 128 - zero * factor in each byte
    if constexpr (!kNegative) return V::same(0);
    const I of_word = V::times_plus(factor, V::same_words(-Format::kZero), V::same_words(kZero));
    return V::times_plus(of_word, V::same_words(257), V::same(0));
  }
};

// T rows of activations against G vectors of a folded block's rows. Terms: of IntegerProducts.
template <class V, class Dot, class Format, int T, int G>
struct FoldedTile {
  using I = typename V::I;
  using F = typename V::F;
  using Block = FoldedBlock<V, Format>;
  static constexpr bool kHeld = T <= Dot::held(1);

  template <class Rows, class Part, class Terms>
  [[gnu::noinline]] static void multiply(const Rows& rows, const Part& part, const Terms& terms, int g0,
                                         float* out) {
    const Block& block = *reinterpret_cast<const Block*>(part.bytes);
    float* const home = out + V::kLanes * g0;
    const int8_t* x[T];
    F acc[T][G];
    typename Block::Scales scales[G];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      x[t] = rows.q + t * rows.row_bytes;
#pragma GCC unroll 4
      for (int g = 0; g < G && kHeld; ++g) acc[t][g] = V::load(home + kPanelRows * t + V::kLanes * g);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) scales[g] = block.scales(g0 + g);
    const uint8_t* weights = block.weights[0][0] + V::kBytes * g0;
    const char* next = part.next;
    for (int subblock = 0; subblock < Block::kSubblocks; ++subblock, weights += 8 * kSliceBytes) {
      for (int i = 0; i < part.lines; ++i, next += 64) V::prefetch(next);
      typename Dot::Sum sums[T][G];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
          sums[t][g] = Block::kZero == 0 ? Dot::readable() : Dot::begin(&terms.folded[t][subblock]);
      }
#pragma GCC unroll 8
      for (int slice = 0; slice < 8; ++slice) {
        typename Dot::Weights w[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) w[g] = Dot::load(weights + kSliceBytes * slice + V::kBytes * g);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const I values = V::broadcast(x[t] + 4 * slice);
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) Dot::add(sums[t][g], w[g], values);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          float* const to = home + kPanelRows * t + V::kLanes * g;
          const F total =
              block.add(subblock, g0 + g, sums[t][g], scales[g],
                        terms.token().at(Terms::kSubblocks * t + subblock), kHeld ? acc[t][g] : V::load(to));
          if constexpr (kHeld) {
            acc[t][g] = total;
          } else {
            V::store(to, total);
          }
        }
        x[t] += 32;
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T && kHeld; ++t) {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) V::store(home + kPanelRows * t + V::kLanes * g, acc[t][g]);
    }
  }
};

}  // namespace
}  // namespace twofold::kernels
