// How integer_products.h sums where an instruction adds products of bytes to 32 bits: a run is one sum, which
// begins with what the weights' offset takes away. Scales are multiplied as floats. Anonymous namespace: each
// file that includes this is compiled with flags of its own and must not share code with another.
#pragma once
#include <cstdint>

#include "integer_terms.h"
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

  template <int kZero, bool kHalves>
  static void zeros(const int8_t*, const int32_t* sum16, int32_t* zero) {
    RunTerms::of_zeros<kZero, kHalves>(sum16, zero);
  }
  static Sum begin(const int32_t* zero) { return V::same(*zero); }
  static Sum none() { return V::same(0); }
  static Weights weights(typename V::I bytes) { return bytes; }
  static Weights load(const uint8_t* stored) { return V::load(stored); }
  static void store(uint8_t* stored, Weights w) { V::store(stored, w); }

  struct One {};
  static One one() { return {}; }
  template <SubScale kSub>
  static Total sub_scale(const uint8_t* p) {
    return kernels::sub_scale<V, kSub>(p);
  }
  static Total pair_scale(const uint8_t* p, int half) { return V::pair_low(p, half); }
  static Total first(Sum sum, One) { return V::to_float(sum); }
  static Total first(Sum sum, Total c) { return V::mul(V::to_float(sum), c); }
  static Total next(Total total, Sum, One) { return total; }
  static Total next(Total total, Sum sum, Total c) { return V::fma(V::to_float(sum), c, total); }
  static Total value(Total total) { return total; }
};

}  // namespace
}  // namespace twofold::kernels
