// AVX-512 with BF16: as avx512.cpp, but products with bfloat16 weights use the CPU's bfloat16 dot products,
// twice the arithmetic per instruction. For these products the activations are rounded to bfloat16 too, as a
// model run in bfloat16 does; they are rounded while they are loaded, so nothing is stored twice. Everything
// else is as exact as on avx512.
//
// It rounds where the other levels do not, so it is never chosen by itself: TWOFOLD_ISA=avx512_bf16 asks for
// it.
#include "avx512_vector.h"

namespace twofold::kernels {
namespace {

// Lane i of the sum receives x[2i] w[2i] and x[2i+1] w[2i+1] of every 32 elements.
struct PairProduct {
  using Element = uint16_t;
  using Values = __m512bh;
  using Weights = __m512bh;
  static constexpr int kStep = 32;
  static constexpr bool kRounds = true;

  static Values values(const uint16_t* x) { return packed(x); }
  static Values first_values(const uint16_t* x, int) { return packed(x); }  // zeros follow the last
  static Values packed(const uint16_t* x) { return reinterpret_cast<Values>(_mm512_loadu_si512(x)); }
  static void pack(Values x, uint16_t* to) { _mm512_storeu_si512(to, reinterpret_cast<__m512i>(x)); }
  static Values values(const float* x) { return _mm512_cvtne2ps_pbh(Avx512::load(x + 16), Avx512::load(x)); }
  static Values first_values(const float* x, int n) {
    const __m512 low = Avx512::load_first(x, n < 16 ? n : 16);
    return _mm512_cvtne2ps_pbh(n > 16 ? Avx512::load_first(x + 16, n - 16) : Avx512::zero(), low);
  }
  static Weights weights(const uint16_t* w) {
    __m512i loaded = _mm512_loadu_si512(w);
    __asm__("" : "+v"(loaded));  // GCC 12 would load it again for every token of the tile
    return reinterpret_cast<Weights>(loaded);
  }
  static Weights first_weights(const uint16_t* w, int n) {
    return reinterpret_cast<Weights>(_mm512_maskz_loadu_epi16((1u << n) - 1u, w));
  }
  static __m512 add(Values x, Weights w, __m512 sum) { return _mm512_dpbf16_ps(sum, x, w); }
};

template <class W>
struct ProductOf {
  using Type = WidenedProduct<Avx512, W>;
};
template <>
struct ProductOf<uint16_t> {
  using Type = PairProduct;
};

struct Avx512Bf16 : Avx512 {
  template <class W>
  using Product = typename ProductOf<W>::Type;
};

constexpr KernelTable kTable = Simd<Avx512Bf16>::table("avx512_bf16");

}  // namespace

const KernelTable* avx512_bf16_level() { return &kTable; }

}  // namespace twofold::kernels
