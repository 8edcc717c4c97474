// Activations as packed_kernels.h lays them out, and gate times up, written once over a vector type V (see
// simd_kernels.h for its suppliers); the generic level supplies a vector of one float.
#pragma once
#include <cstdint>

#include "simd_kernels.h"

namespace twofold::kernels {

template <class V>
struct Encode {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;

  // Bytes of a row that begin at `from` and end where its encoding does are zero.
  static void zero(char* from, const char* end) {
    for (; from != end; ++from) *from = 0;
  }

  static void f32(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first, int count,
                  int K) {
    for (int m = 0; m < M; ++m) {
      char* row = static_cast<char*>(rows) + m * row_bytes;
      float* out = reinterpret_cast<float*>(row) + first;
      const float* in = x + m * ldx;
      int k = 0;
      for (; k + kLanes <= count; k += kLanes) V::store(out + k, V::load(in + k));
      for (; k < count; ++k) out[k] = in[k];
      if (first + count == K) zero(row + 4 * static_cast<int64_t>(K), row + 4 * activation_columns(K));
    }
  }

  static void bf16(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first, int count,
                   int K) {
    for (int m = 0; m < M; ++m) {
      char* row = static_cast<char*>(rows) + m * row_bytes;
      f32_to_bf16<V>(x + m * ldx, reinterpret_cast<uint16_t*>(row) + first, count);
      if (first + count == K) zero(row + 2 * static_cast<int64_t>(K), row + 2 * activation_columns(K));
    }
  }

  static void q8(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first, int count,
                 int K) {
    const int64_t P = activation_columns(K);
    for (int m = 0; m < M; ++m) {
      char* row = static_cast<char*>(rows) + m * row_bytes;
      int8_t* q = reinterpret_cast<int8_t*>(row);
      float* scales = reinterpret_cast<float*>(row + P);
      int32_t* sums = reinterpret_cast<int32_t*>(row + P + P / 8);
      const float* in = x + m * ldx;
      int k = 0;
      for (; k + 32 <= count; k += 32)
        q8_subblock(in + k, q + first + k, scales + (first + k) / 32, sums + (first + k) / 16);
      if (k < count) {
        float last[32] = {};
        for (int i = 0; k + i < count; ++i) last[i] = in[k + i];
        q8_subblock(last, q + first + k, scales + (first + k) / 32, sums + (first + k) / 16);
      }
      if (first + count < K) continue;
      const int64_t end = (static_cast<int64_t>(K) + 31) / 32 * 32;
      zero(row + end, row + P);
      zero(row + P + end / 8, row + P + P / 8);
      zero(row + P + P / 8 + end / 4, row + P + P / 8 + P / 4);
    }
  }

  // The scale of what has this largest magnitude, as bits, and its inverse; 0 where all of it is encoded as zeros.
  static float inverse_of(int32_t peak, float* scale) {
    float amax;
    __builtin_memcpy(&amax, &peak, sizeof amax);
    const bool finite = peak < 0x7f800000;
    if (finite && amax >= kSmallestQ8) {
      *scale = amax / 127.0f;
      return 127.0f / amax;
    }
    *scale = finite ? 0.0f : __builtin_nanf("");
    return 0.0f;
  }

  static void q8_subblock(const float* x, int8_t* q, float* scale, int32_t* sums) {
    const float inverse = inverse_of(V::peak_bits32(x), scale);
    if (inverse != 0.0f) return V::quantise32(x, inverse, q, sums);
    for (int i = 0; i < 32; ++i) q[i] = 0;
    sums[0] = sums[1] = 0;
  }

  static void q8_token(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int, int, int K) {
    const int64_t P = activation_columns(K);
    for (int m = 0; m < M; ++m) {
      char* row = static_cast<char*>(rows) + m * row_bytes;
      int8_t* q = reinterpret_cast<int8_t*>(row);
      const float* in = x + m * ldx;
      alignas(64) float last[32] = {};
      const int whole = K / 32 * 32;
      for (int i = whole; i < K; ++i) last[i - whole] = in[i];
      int32_t peak = V::peak_bits32(last);
      for (int k = 0; k < whole; k += 32) {
        const int32_t here = V::peak_bits32(in + k);
        peak = here > peak ? here : peak;
      }
      float scale;
      const float inverse = inverse_of(peak, &scale);
      int32_t sum = 0;
      if (inverse == 0.0f) {
        zero(row, row + P);
      } else {
        int32_t sums[2];
        for (int k = 0; k < K; k += 32) {
          V::quantise32(k < whole ? in + k : last, inverse, q + k, sums);
          sum += sums[0] + sums[1];
        }
        zero(row + (static_cast<int64_t>(K) + 31) / 32 * 32, row + P);
      }
      __builtin_memcpy(row + P, &scale, sizeof scale);
      __builtin_memcpy(row + P + 4, &sum, sizeof sum);
    }
  }

  // As kernels::gated (expert.h).
  template <ExpertActivation kActivation, bool kLimited>
  static F gated(F gate, F up, float limit) {
    const F one = V::set1(1.0f), zero = V::zero();
    const auto share = [&](F v, F t) { return V::div(v, V::add(one, V::exp(V::sub(zero, t)))); };
    const auto at_most = [&](F v) {  // NaN is the second operand: it passes
      if constexpr (kLimited) return V::min(V::set1(limit), v);
      return v;
    };
    if constexpr (kLimited) up = at_most(V::max(V::set1(-limit), up));
    if constexpr (kActivation == ExpertActivation::kSwigluOai) {
      const F g = at_most(gate);
      return V::mul(V::add(up, one), share(g, V::mul(g, V::set1(kSwigluAlpha))));
    } else if constexpr (kActivation == ExpertActivation::kGeluTanh) {
      const F t = V::fma(V::mul(gate, gate), V::set1(kGeluCubic), V::set1(kGeluLinear));
      return V::mul(at_most(share(gate, V::mul(gate, t))), up);
    } else if constexpr (kActivation == ExpertActivation::kSiluOfLimited) {
      const F g = at_most(gate);
      return V::mul(share(g, g), up);
    } else {
      return V::mul(at_most(share(gate, gate)), up);
    }
  }

  template <ExpertActivation kActivation, bool kLimited>
  static void gated_row(const float* gate, const float* up, float* h, int n, float limit) {
    const auto both = [&](F g, F u) { return gated<kActivation, kLimited>(g, u, limit); };
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) V::store(h + i, both(V::load(gate + i), V::load(up + i)));
    if (i == n) return;
    const int rest = n - i;
    V::store_first(h + i, both(V::load_first(gate + i, rest), V::load_first(up + i, rest)), rest);
  }

  template <ExpertActivation kActivation>
  static void gated_rows(const float* gate, const float* up, float* h, int n, float limit) {
    if (limit > 0) return gated_row<kActivation, true>(gate, up, h, n, limit);
    gated_row<kActivation, false>(gate, up, h, n, limit);
  }

  static constexpr void add_all(KernelTable& table) {
    table.encode[static_cast<int>(ActivationKind::kF32)] = f32;
    table.encode[static_cast<int>(ActivationKind::kBF16)] = bf16;
    table.encode[static_cast<int>(ActivationKind::kQ8)] = q8;
    table.encode[static_cast<int>(ActivationKind::kQ8Token)] = q8_token;
    table.gated[static_cast<int>(ExpertActivation::kSilu)] = gated_rows<ExpertActivation::kSilu>;
    table.gated[static_cast<int>(ExpertActivation::kSwigluOai)] = gated_rows<ExpertActivation::kSwigluOai>;
    table.gated[static_cast<int>(ExpertActivation::kGeluTanh)] = gated_rows<ExpertActivation::kGeluTanh>;
    table.gated[static_cast<int>(ExpertActivation::kSiluOfLimited)] =
        gated_rows<ExpertActivation::kSiluOfLimited>;
  }
};

}  // namespace twofold::kernels
