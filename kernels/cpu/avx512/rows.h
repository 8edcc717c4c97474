// Rows of a panel's sums, 32 floats side by side, from and to matrices that may have fewer rows. For the
// files of the levels with AVX-512. Anonymous namespace: each of those files is compiled with flags of its
// own and must not share code with another.
#pragma once
#include <immintrin.h>

namespace twofold::kernels {
namespace {

struct Avx512Rows {
  static __mmask16 first(int rows) { return static_cast<__mmask16>(rows >= 16 ? 0xffff : (1 << rows) - 1); }
  static void load_rows(const float* p, int rows, float* out) {
    _mm512_storeu_ps(out, _mm512_maskz_loadu_ps(first(rows), p));
    _mm512_storeu_ps(out + 16, _mm512_maskz_loadu_ps(first(rows < 16 ? 0 : rows - 16), p + 16));
  }
  static void store_rows(const float* from, int rows, float* p) {
    _mm512_mask_storeu_ps(p, first(rows), _mm512_loadu_ps(from));
    _mm512_mask_storeu_ps(p + 16, first(rows < 16 ? 0 : rows - 16), _mm512_loadu_ps(from + 16));
  }
};

}  // namespace
}  // namespace twofold::kernels
