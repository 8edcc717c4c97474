// The kernels of the vector levels, written once over a vector type V; avx2/ and avx512/ supply it and
// are compiled with their own flags. V lives in an anonymous namespace there, so no instantiation is shared
// between levels.
//
// No standard library here: a comdat function compiled with AVX-512 could be linked into code that runs
// without.
#pragma once
#include <cstdint>

#include "simd_products.h"

namespace twofold::kernels {

template <class V>
void f32_to_bf16(const float* x, uint16_t* y, int64_t n) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store_bf16(y + i, V::load(x + i));
  if (i == n) return;
  uint16_t last[V::kLanes];
  V::store_bf16(last, V::load_first(x + i, static_cast<int>(n - i)));
  for (int c = 0; i < n; ++i, ++c) y[i] = last[c];
}

template <class V>
struct Simd : Products<V> {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;

  // T rows x C vectors of columns, all n positions, the accumulators in registers.
  template <class W, int T, int C>
  static void weighted_tile(const float* p, int64_t ldp, const W* v, float* out, int64_t ldo, int n, int D) {
    F acc[T][C];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[t][c] = V::load(out + t * ldo + c * kLanes);
    }
    for (int j = 0; j < n; ++j) {
      F value[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) value[c] = V::load(v + static_cast<int64_t>(j) * D + c * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const F weight = V::set1(p[t * ldp + j]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[t][c] = V::fma(weight, value[c], acc[t][c]);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) V::store(out + t * ldo + c * kLanes, acc[t][c]);
    }
  }

  template <class W, int T>
  static void weighted_rows(const float* p, int64_t ldp, const W* v, float* out, int64_t ldo, int n, int D) {
    constexpr int kWide =
        T >= 4 ? V::kTokens - 2 : 4;  // 4 x 4 accumulators on AVX-512, 4 x 2 or 1 x 4 elsewhere
    constexpr int kColumns = kWide < 2 ? 2 : kWide;
    int d = 0;
    for (; d + kColumns * kLanes <= D; d += kColumns * kLanes) {
      weighted_tile<W, T, kColumns>(p, ldp, v + d, out + d, ldo, n, D);
    }
    for (; d + kLanes <= D; d += kLanes) weighted_tile<W, T, 1>(p, ldp, v + d, out + d, ldo, n, D);
    if (d == D) return;
    for (int t = 0; t < T; ++t) {
      F acc = V::load_first(out + t * ldo + d, D - d);
      for (int j = 0; j < n; ++j) {
        acc = V::fma(V::set1(p[t * ldp + j]), V::load_first(v + static_cast<int64_t>(j) * D + d, D - d), acc);
      }
      V::store_first(out + t * ldo + d, acc, D - d);
    }
  }

  template <class W>
  static void weighted_sum(const float* p, int64_t ldp, const void* values, float* out, int64_t ldo, int M,
                           int n, int D) {
    const W* v = static_cast<const W*>(values);
    const int stretch = stretch_rows<W>(D);
    for (int j = 0; j < n; j += stretch) {
      const int rows = n - j < stretch ? n - j : stretch;
      const float* weights = p + j;
      const W* from = v + static_cast<int64_t>(j) * D;
      int m = 0;
      for (; m + 4 <= M; m += 4)
        weighted_rows<W, 4>(weights + m * ldp, ldp, from, out + m * ldo, ldo, rows, D);
      for (; m < M; ++m) weighted_rows<W, 1>(weights + m * ldp, ldp, from, out + m * ldo, ldo, rows, D);
    }
  }

  // Rows that stay in the first-level cache while they are read column by column, for one output row after the other.
  template <class W>
  static int stretch_rows(int D) {
    const int64_t fit = 16384 / (static_cast<int64_t>(D > 0 ? D : 1) * static_cast<int64_t>(sizeof(W)));
    return fit > 16 ? static_cast<int>(fit) : 16;
  }

  template <class W>
  static void widen(const void* from, float* y, int64_t n) {
    const W* x = static_cast<const W*>(from);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(y + i, V::load(x + i));
    if (i < n) V::store_first(y + i, V::load_first(x + i, static_cast<int>(n - i)), static_cast<int>(n - i));
  }

  static float sum(F v) {
    float sums[4];
    V::sum4(v, V::zero(), V::zero(), V::zero(), sums);
    return sums[0];
  }

  static void rmsnorm(const float* x, const float* w, float eps, float* y, int n) {
    F acc[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
      for (int a = 0; a < 4; ++a) {
        const F value = V::load(x + i + a * kLanes);
        acc[a] = V::fma(value, value, acc[a]);
      }
    }
    for (; i < n; i += kLanes) {
      const F value = n - i >= kLanes ? V::load(x + i) : V::load_first(x + i, n - i);
      acc[0] = V::fma(value, value, acc[0]);
    }
    const float squares = sum(V::add(V::add(acc[0], acc[1]), V::add(acc[2], acc[3])));
    const F inverse = V::set1(1.0f / V::square_root(squares / static_cast<float>(n) + eps));
    for (i = 0; i + kLanes <= n; i += kLanes) {
      V::store(y + i, V::mul(V::mul(V::load(x + i), inverse), V::load(w + i)));
    }
    if (i < n) {
      V::store_first(y + i, V::mul(V::mul(V::load_first(x + i, n - i), inverse), V::load_first(w + i, n - i)),
                     n - i);
    }
  }

  static void rope(float* v, const float* cosine, const float* sine, int half) {
    for (int i = 0; i < half; i += kLanes) {
      const int rest = half - i < kLanes ? half - i : kLanes;
      const F a = V::load_first(v + i, rest), b = V::load_first(v + half + i, rest);
      const F c = V::load_first(cosine + i, rest), s = V::load_first(sine + i, rest);
      V::store_first(v + i, V::sub(V::mul(a, c), V::mul(b, s)), rest);
      V::store_first(v + half + i, V::add(V::mul(b, c), V::mul(a, s)), rest);
    }
  }

  static SoftmaxSum softmax_exp(float* s, int n, float scale) {
    const F factor = V::set1(scale);
    F peaks = V::set1(s[0] * scale);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) peaks = V::max(peaks, V::mul(V::load(s + i), factor));
    float peak = V::max_of(peaks);
    for (; i < n; ++i) peak = s[i] * scale > peak ? s[i] * scale : peak;
    const F highest = V::set1(peak);
    F total = V::zero();
    for (i = 0; i + kLanes <= n; i += kLanes) {
      const F e = V::exp(V::sub(V::mul(V::load(s + i), factor), highest));
      V::store(s + i, e);
      total = V::add(total, e);
    }
    if (i < n) {
      const F e = V::exp(V::sub(V::mul(V::load_first(s + i, n - i), factor), highest));
      V::store_first(s + i, e, n - i);
      total = V::add(total, V::load_first(s + i, n - i));  // again from memory: lanes beyond n are zero there
    }
    return {peak, sum(total)};
  }

  static void axpy(float alpha, const float* x, float* y, int n) {
    const F a = V::set1(alpha);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(y + i, V::fma(a, V::load(x + i), V::load(y + i)));
    if (i < n)
      V::store_first(y + i, V::fma(a, V::load_first(x + i, n - i), V::load_first(y + i, n - i)), n - i);
  }

  static void multiply(const float* x, float* y, int n) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(y + i, V::mul(V::load(x + i), V::load(y + i)));
    if (i < n) V::store_first(y + i, V::mul(V::load_first(x + i, n - i), V::load_first(y + i, n - i)), n - i);
  }

  static void relu_sum(const float* x, int64_t ldx, const float* w, float* out, int M, int n) {
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
      F sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
      for (int m = 0; m < M; ++m) {
        const float* from = x + m * ldx + i;
        const F weight = V::set1(w[m]);
#pragma GCC unroll 4
        for (int a = 0; a < 4; ++a)
          sums[a] = V::fma(weight, V::max(V::load(from + a * kLanes), V::zero()), sums[a]);
      }
      for (int a = 0; a < 4; ++a) V::store(out + i + a * kLanes, sums[a]);
    }
    for (; i < n; i += kLanes) {
      const int rest = n - i < kLanes ? n - i : kLanes;
      F sum = V::zero();
      for (int m = 0; m < M; ++m)
        sum = V::fma(V::set1(w[m]), V::max(V::load_first(x + m * ldx + i, rest), V::zero()), sum);
      V::store_first(out + i, sum, rest);
    }
  }

  static void bf16_to_f32(const uint16_t* x, float* y, int64_t n) { widen<uint16_t>(x, y, n); }

  template <class W>
  static constexpr RowKernels rows_of() {
    return {Products<V>::template matmul<W>, weighted_sum<W>, widen<W>};
  }

  static constexpr KernelTable part() {
    KernelTable table;
    table.row_kernels[static_cast<int>(DType::kF32)] = rows_of<float>();
    table.row_kernels[static_cast<int>(DType::kBF16)] = rows_of<uint16_t>();
    table.row_kernels[static_cast<int>(DType::kI8)] = rows_of<int8_t>();
    table.row_kernels[static_cast<int>(DType::kFP8)] = rows_of<Fp8>();
    table.rmsnorm = rmsnorm;
    table.rope = rope;
    table.softmax_exp = softmax_exp;
    table.axpy = axpy;
    table.multiply = multiply;
    table.relu_sum = relu_sum;
    table.bf16_to_f32 = bf16_to_f32;
    table.f32_to_bf16 = f32_to_bf16<V>;
    table.read_all = V::read_all;
    return table;
  }
};

// exp(v) = 2^n * e^r with n = round(v / ln 2), |r| <= ln 2 / 2 and Cephes' degree-6 polynomial (expf.c, S.
// Moshier): below 2 ulp on [-87.3, 88]. Outside, v is clamped, which SiLU and softmax cannot tell from the
// truth; NaN passes.
namespace exp_constants {
constexpr float kLowest = -87.33654f, kHighest = 88.0f, kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kPolynomial[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                  4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
}  // namespace exp_constants

}  // namespace twofold::kernels
