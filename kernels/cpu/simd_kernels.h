// The kernels of the vector levels, written once over a vector type V; avx2.cpp and avx512.cpp supply it and
// are compiled with their own flags. V lives in an anonymous namespace there, so no instantiation is shared
// between levels.
//
// Every dot product uses V::kLanes partial sums, one vector register per output element, and V::sum4's
// reduction tree: halves added, then quarters, and so on. Tiles only decide how many such elements are
// computed side by side.
//
// No standard library here: a comdat function compiled with AVX-512 could be linked into code that runs
// without.
#pragma once
#include <cstdint>

namespace twofold::kernels {

// Weights widened to float32 and multiplied with float32 activations: exact products, one rounding per
// addition.
template <class V, class W>
struct WidenedProduct {
  using Values = typename V::F;
  using Weights = typename V::F;
  static constexpr int kStep = V::kLanes;

  static Values values(const float* x) { return V::load(x); }
  static Values first_values(const float* x, int n) { return V::load_first(x, n); }
  static Weights weights(const W* w) { return V::load(w); }
  static Weights first_weights(const W* w, int n) { return V::load_first(w, n); }
  static Values add(Values x, Weights w, Values sum) { return V::fma(x, w, sum); }
};

template <class V>
struct Simd {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kRows = 4;             // weight rows per tile
  static constexpr int kTokens = V::kTokens;  // activation rows per tile, at most
  static constexpr int kTokenBlock = 48;      // activation rows kept near the core while all weight rows pass
  static constexpr int kColumnBlock = 32;     // columns of gate and up held on the stack before SiLU
  static constexpr int kPrefetchBytes = 4096;  // ahead of the weights of a single activation row

  // What one step along K multiplies: V says how it reads and multiplies weights of type W, and how many at a
  // time.
  template <class W>
  using Product = typename V::template Product<W>;

  // out[t * ldo + r] = x_t . w_r for T activation rows and R consecutive weight rows.
  template <class W, int R, int T>
  static void dot_tile(const float* x, int64_t ldx, const W* w, float* out, int64_t ldo, int K) {
    using P = Product<W>;
    F acc[T][kRows];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[t][r] = V::zero();
    }
    int k = 0;
    for (; k + P::kStep <= K; k += P::kStep) {
      typename P::Weights row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        row[r] = P::weights(w + static_cast<int64_t>(r) * K + k);
        V::prefetch(w + static_cast<int64_t>(r + R) * K + k);  // the same place in the next tile
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const typename P::Values value = P::values(x + t * ldx + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r] = P::add(value, row[r], acc[t][r]);
      }
    }
    if (k < K) {
      typename P::Weights row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) row[r] = P::first_weights(w + static_cast<int64_t>(r) * K + k, K - k);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const typename P::Values value = P::first_values(x + t * ldx + k, K - k);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r] = P::add(value, row[r], acc[t][r]);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      if constexpr (R == kRows) {
        V::sum4(acc[t][0], acc[t][1], acc[t][2], acc[t][3], out + t * ldo);
      } else {
        float sums[kRows];
        V::sum4(acc[t][0], acc[t][1], acc[t][2], acc[t][3], sums);
        for (int r = 0; r < R; ++r) out[t * ldo + r] = sums[r];
      }
    }
  }

  // The same for one activation row, bound by memory: one weight row after the other, so that memory is read
  // in one ascending stream, which is what its prefetchers and ours like best.
  template <class W, int R>
  static void dot_one(const float* x, const W* w, float* out, int K) {
    using P = Product<W>;
    constexpr int kLineSteps =
        64 / static_cast<int>(P::kStep * sizeof(W)) > 1 ? 64 / static_cast<int>(P::kStep * sizeof(W)) : 1;
    F acc[kRows] = {V::zero(), V::zero(), V::zero(), V::zero()};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const W* row = w + static_cast<int64_t>(r) * K;
      int k = 0;
      for (; k + kLineSteps * P::kStep <= K; k += kLineSteps * P::kStep) {
        V::prefetch(row + k + kPrefetchBytes / static_cast<int>(sizeof(W)));
#pragma GCC unroll 4
        for (int i = 0; i < kLineSteps * P::kStep; i += P::kStep) {
          acc[r] = P::add(P::values(x + k + i), P::weights(row + k + i), acc[r]);
        }
      }
      for (; k + P::kStep <= K; k += P::kStep) acc[r] = P::add(P::values(x + k), P::weights(row + k), acc[r]);
      if (k < K) acc[r] = P::add(P::first_values(x + k, K - k), P::first_weights(row + k, K - k), acc[r]);
    }
    float sums[kRows];
    V::sum4(acc[0], acc[1], acc[2], acc[3], sums);
    for (int r = 0; r < R; ++r) out[r] = sums[r];
  }

  template <class W, int R>
  static void dot_tokens(const float* x, int64_t ldx, const W* w, float* out, int64_t ldo, int tokens,
                         int K) {
    switch (tokens) {
      case 1:
        return dot_tile<W, R, 1>(x, ldx, w, out, ldo, K);
      case 2:
        return dot_tile<W, R, 2>(x, ldx, w, out, ldo, K);
      default:
        break;
    }
    if constexpr (kTokens >= 6) {
      switch (tokens) {
        case 3:
          return dot_tile<W, R, 3>(x, ldx, w, out, ldo, K);
        case 4:
          return dot_tile<W, R, 4>(x, ldx, w, out, ldo, K);
        case 5:
          return dot_tile<W, R, 5>(x, ldx, w, out, ldo, K);
        default:
          return dot_tile<W, R, 6>(x, ldx, w, out, ldo, K);
      }
    }
  }

  // All of `tokens` activation rows against R weight rows, in tiles as even as possible.
  template <class W, int R>
  static void dot_rows(const float* x, int64_t ldx, const W* w, float* out, int64_t ldo, int tokens, int K) {
    int tiles = (tokens + kTokens - 1) / kTokens;
    for (int t = 0; t < tokens; --tiles) {
      const int take = (tokens - t + tiles - 1) / tiles;
      dot_tokens<W, R>(x + t * ldx, ldx, w, out + t * ldo, ldo, take, K);
      t += take;
    }
  }

  template <class W>
  static void matmul(const float* x, int64_t ldx, const W* w, float* y, int64_t ldy, int M, int N, int K) {
    for (int m = 0; m < M; m += kTokenBlock) {
      const int tokens = M - m < kTokenBlock ? M - m : kTokenBlock;
      int n = 0;
      for (; n + kRows <= N; n += kRows) {
        dot_rows<W, kRows>(x + m * ldx, ldx, w + static_cast<int64_t>(n) * K, y + m * ldy + n, ldy, tokens,
                           K);
      }
      for (; n < N; ++n) {
        dot_rows<W, 1>(x + m * ldx, ldx, w + static_cast<int64_t>(n) * K, y + m * ldy + n, ldy, tokens, K);
      }
    }
  }

  static F silu(F v) { return V::div(v, V::add(V::set1(1.0f), V::exp(V::sub(V::zero(), v)))); }

  template <class W>
  static void gate_up(const float* x, int64_t ldx, const W* gate, const W* up, float* h, int64_t ldh, int M,
                      int N, int K) {
    float gates[kTokenBlock][kColumnBlock], ups[kTokenBlock][kColumnBlock];
    for (int m = 0; m < M; m += kTokenBlock) {
      const int tokens = M - m < kTokenBlock ? M - m : kTokenBlock;
      for (int n = 0; n < N; n += kColumnBlock) {
        const int columns = N - n < kColumnBlock ? N - n : kColumnBlock;
        const int64_t row = static_cast<int64_t>(n) * K;
        matmul<W>(x + m * ldx, ldx, gate + row, gates[0], kColumnBlock, tokens, columns, K);
        matmul<W>(x + m * ldx, ldx, up + row, ups[0], kColumnBlock, tokens, columns, K);
        for (int t = 0; t < tokens; ++t) {
          float* out = h + (m + t) * ldh + n;
          int c = 0;
          for (; c + kLanes <= columns; c += kLanes) {
            V::store(out + c, V::mul(silu(V::load(gates[t] + c)), V::load(ups[t] + c)));
          }
          if (c < columns) {
            const int rest = columns - c;
            V::store_first(out + c,
                           V::mul(silu(V::load_first(gates[t] + c, rest)), V::load_first(ups[t] + c, rest)),
                           rest);
          }
        }
      }
    }
  }

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
  static void weighted_sum(const float* p, int64_t ldp, const W* v, float* out, int64_t ldo, int M, int n,
                           int D) {
    int m = 0;
    for (; m + 4 <= M; m += 4) weighted_rows<W, 4>(p + m * ldp, ldp, v, out + m * ldo, ldo, n, D);
    for (; m < M; ++m) weighted_rows<W, 1>(p + m * ldp, ldp, v, out + m * ldo, ldo, n, D);
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

  static float softmax_exp(float* s, int n, float scale) {
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
    return sum(total);
  }

  static void axpy(float alpha, const float* x, float* y, int n) {
    const F a = V::set1(alpha);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(y + i, V::fma(a, V::load(x + i), V::load(y + i)));
    if (i < n)
      V::store_first(y + i, V::fma(a, V::load_first(x + i, n - i), V::load_first(y + i, n - i)), n - i);
  }

  static void bf16_to_f32(const uint16_t* x, float* y, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(y + i, V::load(x + i));
    if (i < n) V::store_first(y + i, V::load_first(x + i, static_cast<int>(n - i)), static_cast<int>(n - i));
  }

  static void f32_to_bf16(const float* x, uint16_t* y, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store_bf16(y + i, V::load(x + i));
    if (i == n) return;
    uint16_t last[kLanes];
    V::store_bf16(last, V::load_first(x + i, static_cast<int>(n - i)));
    for (int c = 0; i < n; ++i, ++c) y[i] = last[c];
  }

  static constexpr KernelTable table(const char* name) {
    return {
        .name = name,
        .matmul_f32 = matmul<float>,
        .matmul_bf16 = matmul<uint16_t>,
        .gate_up_f32 = gate_up<float>,
        .gate_up_bf16 = gate_up<uint16_t>,
        .weighted_sum_f32 = weighted_sum<float>,
        .weighted_sum_bf16 = weighted_sum<uint16_t>,
        .rmsnorm = rmsnorm,
        .rope = rope,
        .softmax_exp = softmax_exp,
        .axpy = axpy,
        .bf16_to_f32 = bf16_to_f32,
        .f32_to_bf16 = f32_to_bf16,
        .read_all = V::read_all,
    };
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
