// AVX-VNNI (256-bit dpbusd without AVX-512): products of q8 activations with packed integer weights. A tile
// is half a panel (two vectors of 8 rows) x up to 5 tokens; the float sums stay in the first-level cache.
#include "avx2_integer_vector.h"

namespace twofold::kernels {
namespace {

struct AvxVnni : Avx2Integer {
  static constexpr int kVectors = 2;
  static constexpr int tokens(int /*bits*/, bool halves) { return halves ? 4 : 5; }
  static constexpr int held(bool /*halves*/) { return 1; }

  template <int kBits>
  struct Dot {
    using Sum = I;
    using Weights = I;
    static Sum begin(const int32_t* zero) { return _mm256_set1_epi32(*zero); }
    static Weights weights(I bytes) { return bytes; }
    static void add(Sum& sum, Weights w, I values) { sum = _mm256_dpbusd_avx_epi32(sum, w, values); }
    static I end(Sum sum, const int32_t*) { return sum; }
  };
};

constexpr KernelTable kPart = integer_part<AvxVnni>();

}  // namespace

const KernelTable* avx_vnni_integer() { return &kPart; }

}  // namespace twofold::kernels
