// The scalar reference: every other level is tested against it, and it runs on CPUs without a better level.
#include <cmath>

#define TWOFOLD_VECTOR_BYTES 16
#include "levels.h"
#include "sampling_lanes.h"

namespace twofold::kernels {
namespace {

float widen(float v) { return v; }
float widen(uint16_t v) { return float_of_bf16(v); }
float widen(int8_t v) { return v; }
float widen(Fp8 v) { return float_of_e4m3(v.bits) * (1.0f / kFP8Scale); }

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
void matmul(const float* x, int64_t ldx, const void* w, float* y, int64_t ldy, int M, int N, int K) {
  for (int n = 0; n < N; ++n) {
    const W* row = static_cast<const W*>(w) + static_cast<int64_t>(n) * K;
    for (int m = 0; m < M; ++m) y[m * ldy + n] = dot(x + m * ldx, row, K);
  }
}

template <class W>
void weighted_sum(const float* p, int64_t ldp, const void* v, float* out, int64_t ldo, int M, int n, int D) {
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < n; ++j) {
      const float weight = p[m * ldp + j];
      const W* row = static_cast<const W*>(v) + static_cast<int64_t>(j) * D;
      for (int d = 0; d < D; ++d) out[m * ldo + d] += weight * widen(row[d]);
    }
  }
}

template <class W>
void widen_all(const void* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = widen(static_cast<const W*>(x)[i]);
}

template <class W>
constexpr RowKernels kRows = {matmul<W>, weighted_sum<W>, widen_all<W>};

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

SoftmaxSum softmax_exp(float* s, int n, float scale) {
  float peak = s[0] * scale;
  for (int i = 1; i < n; ++i) peak = s[i] * scale > peak ? s[i] * scale : peak;
  float sum = 0;
  for (int i = 0; i < n; ++i) {
    s[i] = std::exp(s[i] * scale - peak);
    sum += s[i];
  }
  return {peak, sum};
}

void axpy(float alpha, const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] += alpha * x[i];
}

void multiply(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] *= x[i];
}

void relu_sum(const float* x, int64_t ldx, const float* w, float* out, int M, int n) {
  for (int i = 0; i < n; ++i) out[i] = 0;
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < n; ++i) out[i] += w[m] * (x[m * ldx + i] > 0 ? x[m * ldx + i] : 0.0f);
  }
}

void bf16_to_f32(const uint16_t* x, float* y, int64_t n) { widen_all<uint16_t>(x, y, n); }

void f32_to_bf16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = bf16_of_float(x[i]);
}

float f32_to_i8(const float* x, int8_t* y, int n) {
  float peak = 0;
  for (int i = 0; i < n; ++i) peak = std::fabs(x[i]) > peak ? std::fabs(x[i]) : peak;
  const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
  // Adding 1.5 * 2^23 leaves the rounded number in the lowest bits. What 127 / peak overflows to is not a number
  // of use, and an infinite or NaN product is cut, too.
  for (int i = 0; i < n; ++i) {
    float v = x[i] * inverse;
    v = v > -127.0f ? v : -127.0f;
    v = v < 127.0f ? v : 127.0f;
    y[i] = static_cast<int8_t>(bits_of_float(v + 12582912.0f) & 0xff);
  }
  return peak / 127.0f;
}

void f32_to_fp8(const float* x, uint8_t* y, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t sign = bits_of_float(x[i]) >> 24 & 0x80;
    float magnitude = std::fabs(x[i]);
    magnitude = magnitude < kLargestFP8 ? magnitude : kLargestFP8;
    const uint32_t bits = bits_of_float(magnitude);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const float shifted = magnitude + 16384.0f;  // whose last bit is 2^-9, as is that of a subnormal FP8
    const uint32_t small = bits_of_float(shifted) - 0x46800000u;
    y[i] = static_cast<uint8_t>(sign | (magnitude < 0x1p-6f ? small : normal));
  }
}

uint64_t read_all(const void* memory, int64_t num_bytes) {
  uint64_t sums[4] = {};
  int64_t i = 0;
  for (; i + 32 <= num_bytes; i += 32) {
    uint64_t words[4];
    __builtin_memcpy(words, static_cast<const char*>(memory) + i, sizeof words);
    for (int w = 0; w < 4; ++w) sums[w] += words[w];
  }
  for (; i < num_bytes; ++i) sums[0] += static_cast<const unsigned char*>(memory)[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

constexpr KernelTable kPart = {
    .row_kernels = {kRows<float>, kRows<uint16_t>, kRows<int8_t>, kRows<Fp8>},
    .rmsnorm = rmsnorm,
    .rope = rope,
    .softmax_exp = softmax_exp,
    .axpy = axpy,
    .multiply = multiply,
    .relu_sum = relu_sum,
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .f32_to_i8 = f32_to_i8,
    .f32_to_fp8 = f32_to_fp8,
    .read_all = read_all,
    .sampling = &SamplingLanes::kKernels,
};

}  // namespace

const KernelTable* generic_level() { return &kPart; }

}  // namespace twofold::kernels
