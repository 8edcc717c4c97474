// AVX2: products of q8 activations with packed integer weights. maddubs adds two products of bytes to 16 bits
// and saturates; nibbles cannot saturate it, nor the sum of the 8 steps of a run: 16 * 15 * 127 < 2^15. So
// bytes are taken as two nibbles.
#include "avx2_integer_vector.h"

namespace twofold::kernels {
namespace {

struct Avx2 : Avx2Integer {
  static constexpr int kVectors = 2;
  static constexpr int tokens(int bits, bool /*halves*/) { return bits == 4 ? 3 : 2; }
  static constexpr int held(bool /*halves*/) { return 1; }

  // GCC would add products to each other first, for which 16 registers are too few.
  static I in_order(I sum) {
    __asm__("" : "+x"(sum));
    return sum;
  }

  // Nibbles: 16-bit sums of pairs.
  template <int kBits>
  struct Dot {
    using Sum = I;
    using Weights = I;
    static Sum begin(const int32_t*) { return _mm256_setzero_si256(); }
    static Weights weights(I bytes) { return bytes; }
    static void add(Sum& sum, Weights w, I values) {
      sum = in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, values)));
    }
    static I end(Sum sum, const int32_t* zero) {
      return _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), _mm256_set1_epi32(*zero));
    }
  };
};

template <>
struct Avx2::Dot<8> {
  struct Sum {
    I low, high;
  };
  using Weights = Sum;
  static Sum begin(const int32_t*) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Weights weights(I bytes) { return {low_nibbles(bytes), high_nibbles(bytes)}; }
  static void add(Sum& sum, Weights w, I values) {
    sum.low = in_order(_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low, values)));
    sum.high = in_order(_mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high, values)));
  }
  static I end(Sum sum, const int32_t* zero) {
    const I low = _mm256_madd_epi16(sum.low, _mm256_set1_epi16(1));
    const I high = _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16));
    return _mm256_add_epi32(_mm256_add_epi32(low, high), _mm256_set1_epi32(*zero));
  }
};

constexpr KernelTable kPart = integer_part<Avx2>();

}  // namespace

const KernelTable* avx2_integer() { return &kPart; }

}  // namespace twofold::kernels
