// The gated delta net over a vector type V; simd_kernels.h lists its suppliers and what it may be shared with.
#pragma once
#include <cstdint>

#include "twofold/kernels.h"

namespace twofold::kernels {

template <class V>
struct Delta {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kVectors = 2;  // of columns that are computed together
  static constexpr int kChains =
      2;  // sums over keys, of the even ones and the odd ones: additions that overlap

  struct Sums {
    F seen[kVectors], asked[kVectors];  // S^T k, S^T q
  };

  // Carries the token of `key`, `decay` and `change` into the state (kCarries) and multiplies it with the keys and
  // queries of the next (kMultiplies). All but the state is in registers meanwhile.
  template <bool kCarries, bool kMultiplies>
  static void pass(float* state, int K, const float* key, F decay, const F (&change)[kVectors],
                   const float* next_k, const float* next_q, Sums& sums) {
    F seen[kChains][kVectors], asked[kChains][kVectors], delta[kVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; ++c) {
      delta[c] = change[c];
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) seen[chain][c] = asked[chain][c] = V::zero();
    }
    const auto one = [&](int i, int chain) __attribute__((always_inline)) {
      float* at = state + int64_t{i} * kDeltaColumns;
      F s[kVectors];
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) s[c] = V::load(at + c * kLanes);
      if constexpr (kCarries) {
        const F k = V::set1(key[i]);
#pragma GCC unroll 2
        for (int c = 0; c < kVectors; ++c) {
          s[c] = V::fma(k, delta[c], V::mul(decay, s[c]));
          V::store(at + c * kLanes, s[c]);
        }
      }
      if constexpr (kMultiplies) {
        const F k = V::set1(next_k[i]), q = V::set1(next_q[i]);
#pragma GCC unroll 2
        for (int c = 0; c < kVectors; ++c) {
          seen[chain][c] = V::fma(k, s[c], seen[chain][c]);
          asked[chain][c] = V::fma(q, s[c], asked[chain][c]);
        }
      }
    };
    int i = 0;
    for (; i + kChains <= K; i += kChains) {
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) one(i + chain, chain);
    }
    if (i < K) one(i, 0);
    if constexpr (kMultiplies) {
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) {
        sums.seen[c] = V::add(seen[0][c], seen[1][c]);
        sums.asked[c] = V::add(asked[0][c], asked[1][c]);
      }
    }
  }

  static void columns(const DeltaTokens& tokens, int num_tokens, float* state, int K, int first) {
    F decay = V::zero(), delta[kVectors] = {V::zero(), V::zero()};
    Sums sums;
    pass<false, true>(state, K, nullptr, decay, delta, tokens.k, tokens.q, sums);
    for (int t = 0; t < num_tokens; ++t) {
      const int64_t gates = t * tokens.gate_stride, values = t * tokens.value_stride + first;
      decay = V::set1(tokens.decay[gates]);
      const F beta = V::set1(tokens.beta[gates]), kq = V::set1(tokens.kq[gates]);
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) {
        const F v = V::load(tokens.v + values + c * kLanes);
        delta[c] = V::mul(beta, V::sub(v, V::mul(decay, sums.seen[c])));
        V::store(tokens.out + values + c * kLanes, V::fma(kq, delta[c], V::mul(decay, sums.asked[c])));
      }
      const float *k = tokens.k + t * tokens.key_stride, *q = tokens.q + t * tokens.key_stride;
      if (t + 1 < num_tokens) {
        pass<true, true>(state, K, k, decay, delta, k + tokens.key_stride, q + tokens.key_stride, sums);
      } else {
        pass<true, false>(state, K, k, decay, delta, nullptr, nullptr, sums);
      }
    }
  }

  static void delta_rule(const DeltaTokens& tokens, int num_tokens, float* state, int K) {
    if (num_tokens == 0) return;
    for (int c = 0; c < kDeltaColumns; c += kVectors * kLanes) columns(tokens, num_tokens, state + c, K, c);
  }

  static F sigmoid(F v) { return V::div(V::set1(1.0f), V::add(V::set1(1.0f), V::exp(V::sub(V::zero(), v)))); }

  template <class Load>
  static F convolved(const float* const* rows, int taps, const float* w, int64_t ldw, int c, Load load) {
    F sum = V::mul(load(w + c), load(rows[0] + c));
    for (int j = 1; j < taps; ++j) sum = V::fma(load(w + j * ldw + c), load(rows[j] + c), sum);
    return V::mul(sum, sigmoid(sum));
  }

  static void short_convolution(const float* const* rows, int taps, const float* w, int64_t ldw, float* y,
                                int n) {
    int c = 0;
    for (; c + kLanes <= n; c += kLanes)
      V::store(y + c, convolved(rows, taps, w, ldw, c, [](const float* p) { return V::load(p); }));
    if (c == n) return;
    const int rest = n - c;
    const F last =
        convolved(rows, taps, w, ldw, c, [rest](const float* p) { return V::load_first(p, rest); });
    V::store_first(y + c, last, rest);
  }

  static void sigmoid_multiply(const float* x, float* y, int n) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(y + i, V::mul(sigmoid(V::load(x + i)), V::load(y + i)));
    if (i < n)
      V::store_first(y + i, V::mul(sigmoid(V::load_first(x + i, n - i)), V::load_first(y + i, n - i)), n - i);
  }

  static constexpr DeltaKernels kernels() { return {delta_rule, short_convolution, sigmoid_multiply}; }
};

}  // namespace twofold::kernels
