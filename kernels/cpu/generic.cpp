// The scalar reference: what every other level is tested against, and what runs where nothing better does.
#include <cmath>
#include <cstring>

#include "levels.h"

namespace twofold::kernels {
namespace {

float widen(float v) { return v; }
float widen(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

uint16_t narrow(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  if (std::isnan(v)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Four partial sums, so that the reference is not needlessly slow; their number never changes.
template <class W>
float dot(const float* x, const W* w, int n) {
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  int k = 0;
  for (; k + 4 <= n; k += 4) {
    s0 += x[k] * widen(w[k]);
    s1 += x[k + 1] * widen(w[k + 1]);
    s2 += x[k + 2] * widen(w[k + 2]);
    s3 += x[k + 3] * widen(w[k + 3]);
  }
  for (; k < n; ++k) s0 += x[k] * widen(w[k]);
  return (s0 + s2) + (s1 + s3);
}

template <class W>
void matmul(const float* x, int64_t ldx, const W* w, float* y, int64_t ldy, int M, int N, int K) {
  for (int n = 0; n < N; ++n) {
    const W* row = w + static_cast<int64_t>(n) * K;
    for (int m = 0; m < M; ++m) y[m * ldy + n] = dot(x + m * ldx, row, K);
  }
}

template <class W>
void weighted_sum(const float* p, int64_t ldp, const W* v, float* out, int64_t ldo, int M, int n, int D) {
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < n; ++j) {
      const float weight = p[m * ldp + j];
      const W* row = v + static_cast<int64_t>(j) * D;
      for (int d = 0; d < D; ++d) out[m * ldo + d] += weight * widen(row[d]);
    }
  }
}

void rmsnorm(const float* x, const float* w, float eps, float* y, int n) {
  const float inverse = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) y[i] = x[i] * inverse * w[i];
}

void rope(float* v, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    v[i] = a * cosine[i] - b * sine[i];
    v[i + half] = b * cosine[i] + a * sine[i];
  }
}

float softmax_exp(float* s, int n, float scale) {
  float peak = s[0] * scale;
  for (int i = 1; i < n; ++i) peak = s[i] * scale > peak ? s[i] * scale : peak;
  float sum = 0;
  for (int i = 0; i < n; ++i) {
    s[i] = std::exp(s[i] * scale - peak);
    sum += s[i];
  }
  return sum;
}

void axpy(float alpha, const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] += alpha * x[i];
}

void bf16_to_f32(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = widen(x[i]);
}

void f32_to_bf16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = narrow(x[i]);
}

uint64_t read_all(const void* memory, int64_t num_bytes) {
  uint64_t sums[4] = {};
  int64_t i = 0;
  for (; i + 32 <= num_bytes; i += 32) {
    uint64_t words[4];
    std::memcpy(words, static_cast<const char*>(memory) + i, sizeof words);
    for (int w = 0; w < 4; ++w) sums[w] += words[w];
  }
  for (; i < num_bytes; ++i) sums[0] += static_cast<const unsigned char*>(memory)[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

constexpr KernelTable kPart = {
    .matmul_f32 = matmul<float>,
    .matmul_bf16 = matmul<uint16_t>,
    .weighted_sum_f32 = weighted_sum<float>,
    .weighted_sum_bf16 = weighted_sum<uint16_t>,
    .rmsnorm = rmsnorm,
    .rope = rope,
    .softmax_exp = softmax_exp,
    .axpy = axpy,
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .read_all = read_all,
};

}  // namespace

const KernelTable* generic_level() { return &kPart; }

}  // namespace twofold::kernels
