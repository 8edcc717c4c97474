// The scalar kernels of packed weights: the arithmetic that the vector levels repeat bit for bit.
//
// For one output element, F starting at +0 and fma rounding once:
//   f32, f16, bf16   P = fma(x, w, P) over 64 columns from +0; F = F + P; and so on
//   fp8              the same with w * 2^-8 (the bits of e4m3 in the place of an f16);
//                    F = fma(P, scale * 256, F)
//   q8_0, q4_0       per run of 32 columns: F = fma(acc * scale, xs, F); acc = sum of (u - offset) * q,
//   exact;
//                    xs = the scale of the run's activations
//   int8, int4       per block: t = acc_0 * xs_0, then t = fma(acc_i, xs_i, t); F = fma(t, scale, F); int4
//                    besides: F = fma(xs_0 * sum_0 + xs_1 * sum_1, min, F); sum = the sum of q
//   q4_k, q5_k       per run: F = fma(acc * (d * scale), xs, F); F = fma(xs * sum, -(dmin * min), F)
//   q6_k             per run: t = acc_0 * (d * scale_0), acc_0 of its first 16 columns; t = fma(acc_1, d *
//                    scale_1, t); F = fma(t, xs, F)
// Multiplying the integer sums by the weights' scale first lets every operand but one be a register or a
// broadcast from memory in the vector kernels.
#include <bit>
#include <cmath>

#include "../formats/panel_blocks.h"
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr int kPartialColumns = 64;

struct PlainF32 {
  static constexpr int64_t kColumns = 1, kBytes = kStepBytes;
  static float weight(const uint8_t* block, int row, int64_t) { return load_as<float>(block + 4 * row); }
  static float add(const uint8_t*, int, float partial, float total) { return total + partial; }
};

struct PlainF16 {
  static constexpr int64_t kColumns = 2, kBytes = kStepBytes;
  static float weight(const uint8_t* block, int row, int64_t k) { return f16_at(block + 4 * row + 2 * k); }
  static float add(const uint8_t*, int, float partial, float total) { return total + partial; }
};

struct PlainBF16 {
  static constexpr int64_t kColumns = 2, kBytes = kStepBytes;
  static float weight(const uint8_t* block, int row, int64_t k) {
    return float_of_bf16(load_as<uint16_t>(block + 4 * row + 2 * k));
  }
  static float add(const uint8_t*, int, float partial, float total) { return total + partial; }
};

struct ScaledFP8 {
  static constexpr int64_t kColumns = 128, kBytes = 4224;
  static float weight(const uint8_t* block, int row, int64_t k) {
    return scaled_float_of_e4m3(block[kStepBytes + k / 4 * kStepBytes + 4 * row + k % 4]);
  }
  static float add(const uint8_t* block, int row, float partial, float total) {
    return std::fma(partial, load_as<float>(block + 4 * row) * 256.0f, total);
  }
};

template <class Format>
float float_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  const float* values = static_cast<const float*>(x);
  const int64_t end = (K + Format::kColumns - 1) / Format::kColumns * Format::kColumns;
  float total = 0.0f;
  for (int64_t begin = 0; begin < end; begin += kPartialColumns) {
    float partial = 0.0f;
    for (int64_t k = begin; k < end && k < begin + kPartialColumns; ++k) {
      const uint8_t* block = panel + k / Format::kColumns * Format::kBytes;
      partial = std::fma(values[k], Format::weight(block, row, k % Format::kColumns), partial);
    }
    total = Format::add(panel + begin / Format::kColumns * Format::kBytes, row, partial, total);
  }
  return total;
}

// An encoded row of q8 activations, from one of its runs on.
struct Q8Runs {
  const int8_t* q;
  const float* scale;
  const int32_t* sum16;

  Q8Runs(const void* row, int64_t K)
      : q(static_cast<const int8_t*>(row)),
        scale(reinterpret_cast<const float*>(q + activation_columns(K))),
        sum16(reinterpret_cast<const int32_t*>(q + activation_columns(K) + activation_columns(K) / 8)) {}
  Q8Runs(const Q8Runs& all, int64_t run)
      : q(all.q + kRunColumns * run), scale(all.scale + run), sum16(all.sum16 + 2 * run) {}

  float sum(int run) const { return static_cast<float>(sum16[2 * run] + sum16[2 * run + 1]); }
};

// The exact sum of (u - offset) * q over `count` columns.
float product(const uint8_t* u, const int8_t* q, int offset, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += (u[i] - offset) * q[i];
  return static_cast<float>(sum);
}

template <class Panel>
float run_product(const uint8_t* block, int row, int run, const Q8Runs& x) {
  uint8_t u[kRunColumns];
  Panel::values(block, row, run, u);
  return product(u, x.q + kRunColumns * run, Panel::kOffset, kRunColumns);
}

// add_block(block, row, x, F): F after one panel block.
template <class Panel>
float add_block(const uint8_t* block, int row, const Q8Runs& x, float F) {
  constexpr int kRuns = Panel::kColumns / kRunColumns;
  float t = run_product<Panel>(block, row, 0, x) * x.scale[0];
  for (int run = 1; run < kRuns; ++run) t = std::fma(run_product<Panel>(block, row, run, x), x.scale[run], t);
  return std::fma(t, Panel::scale(block, row), F);
}

template <class Panel>
float add_single_run(const uint8_t* block, int row, const Q8Runs& x, float F) {
  return std::fma(run_product<Panel>(block, row, 0, x) * Panel::scale(block, row), x.scale[0], F);
}
template <>
float add_block<PanelQ8_0>(const uint8_t* block, int row, const Q8Runs& x, float F) {
  return add_single_run<PanelQ8_0>(block, row, x, F);
}
template <>
float add_block<PanelQ4_0>(const uint8_t* block, int row, const Q8Runs& x, float F) {
  return add_single_run<PanelQ4_0>(block, row, x, F);
}

template <>
float add_block<PanelInt4>(const uint8_t* block, int row, const Q8Runs& x, float F) {
  float t = run_product<PanelInt4>(block, row, 0, x) * x.scale[0];
  t = std::fma(run_product<PanelInt4>(block, row, 1, x), x.scale[1], t);
  F = std::fma(t, PanelInt4::scale(block, row), F);
  const float v = x.scale[0] * x.sum(0) + x.scale[1] * x.sum(1);
  return std::fma(v, PanelInt4::min(block, row), F);
}

template <class Panel>
float add_k_block(const uint8_t* block, int row, const Q8Runs& x, float F) {
  for (int run = 0; run < 8; ++run) {
    const float scale = Panel::d(block, row) * Panel::scale(block, row, run);
    F = std::fma(run_product<Panel>(block, row, run, x) * scale, x.scale[run], F);
    F = std::fma(-(Panel::dmin(block, row) * Panel::min(block, row, run)), x.scale[run] * x.sum(run), F);
  }
  return F;
}
template <>
float add_block<PanelQ4_K>(const uint8_t* block, int row, const Q8Runs& x, float F) {
  return add_k_block<PanelQ4_K>(block, row, x, F);
}
template <>
float add_block<PanelQ5_K>(const uint8_t* block, int row, const Q8Runs& x, float F) {
  return add_k_block<PanelQ5_K>(block, row, x, F);
}

template <>
float add_block<PanelQ6_K>(const uint8_t* block, int row, const Q8Runs& x, float F) {
  using Panel = PanelQ6_K;
  for (int run = 0; run < 8; ++run) {
    uint8_t u[kRunColumns];
    Panel::values(block, row, run, u);
    float t = 0.0f;
    for (int half = 0; half < 2; ++half) {
      const float acc = product(u + 16 * half, x.q + kRunColumns * run + 16 * half, Panel::kOffset, 16);
      const float scale = Panel::d(block, row) * Panel::scale(block, row, 2 * run + half);
      t = half == 0 ? acc * scale : std::fma(acc, scale, t);
    }
    F = std::fma(t, x.scale[run], F);
  }
  return F;
}

template <class Panel>
float integer_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  const Q8Runs all(x, K);
  float F = 0.0f;
  for (int64_t b = 0; b * Panel::kColumns < K; ++b) {
    F = add_block<Panel>(panel + b * Panel::kBytes, row, Q8Runs(all, b * Panel::kColumns / kRunColumns), F);
  }
  return F;
}

using Element = float (*)(const uint8_t* panel, int row, const void* x, int64_t K);

template <WeightFormat Format, Element Of>
void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M, int N,
            int K) {
  for (int n = 0; n < N; ++n) {
    const uint8_t* panel = static_cast<const uint8_t*>(panels) + n / kPanelRows * panel_bytes(Format, K);
    for (int m = 0; m < M; ++m) {
      y[m * ldy + n] = Of(panel, n % kPanelRows, static_cast<const char*>(x) + m * row_bytes, K);
    }
  }
}

template <class Element>
void zero_behind(Element* row, int first, int count, int K) {
  if (first + count < K) return;
  for (int64_t k = K; k < activation_columns(K); ++k) row[k] = 0;
}

void encode_f32(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first, int count,
                int K) {
  for (int m = 0; m < M; ++m) {
    float* row = reinterpret_cast<float*>(static_cast<char*>(rows) + m * row_bytes);
    for (int k = 0; k < count; ++k) row[first + k] = x[m * ldx + k];
    zero_behind(row, first, count, K);
  }
}

void encode_bf16(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first, int count,
                 int K) {
  for (int m = 0; m < M; ++m) {
    uint16_t* row = reinterpret_cast<uint16_t*>(static_cast<char*>(rows) + m * row_bytes);
    generic_level()->f32_to_bf16(x + m * ldx, row + first, count);
    zero_behind(row, first, count, K);
  }
}

// One run of at most 32 columns; zeros follow up to 32.
void encode_q8_run(const float* x, int count, int8_t* q, float* scale, int32_t* sum16) {
  uint32_t peak = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    peak = magnitude > peak ? magnitude : peak;
  }
  const float amax = std::bit_cast<float>(peak);
  const bool finite = peak < 0x7f800000u, zero = finite && amax < kSmallestQ8;
  const float inverse = finite && !zero ? 127.0f / amax : 0.0f;
  *scale = !finite ? std::bit_cast<float>(0x7fc00000u) : zero ? 0.0f : amax / 127.0f;
  sum16[0] = sum16[1] = 0;
  for (int i = 0; i < kRunColumns; ++i) {
    q[i] = i < count && inverse != 0 ? static_cast<int8_t>(std::nearbyint(x[i] * inverse)) : int8_t{0};
    sum16[i / 16] += q[i];
  }
}

void encode_q8(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first, int count,
               int K) {
  const int64_t P = activation_columns(K);
  const int64_t end = first + count < K ? first + count : P;
  for (int m = 0; m < M; ++m) {
    int8_t* q = reinterpret_cast<int8_t*>(static_cast<char*>(rows) + m * row_bytes);
    float* scale = reinterpret_cast<float*>(q + P);
    int32_t* sum16 = reinterpret_cast<int32_t*>(q + P + P / 8);
    for (int64_t k = first; k < end; k += kRunColumns) {
      const int64_t rest = first + count - k;
      const int columns = rest <= 0 ? 0 : rest < kRunColumns ? static_cast<int>(rest) : kRunColumns;
      encode_q8_run(x + m * ldx + (k - first), columns, q + k, scale + k / 32, sum16 + k / 16);
    }
  }
}

void silu_mul(const float* gate, const float* up, float* h, int n) {
  for (int i = 0; i < n; ++i) h[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

template <WeightFormat Format, Element Of>
constexpr FormatKernels of_floats() {
  return {.activation = ActivationKind::kF32, .matmul = matmul<Format, Of>, .level = nullptr};
}
template <WeightFormat Format, class Panel>
constexpr FormatKernels of_integers() {
  return {
      .activation = ActivationKind::kQ8, .matmul = matmul<Format, integer_element<Panel>>, .level = nullptr};
}

constexpr KernelTable kPart = {
    .formats = {of_floats<WeightFormat::kF32, float_element<PlainF32>>(),
                of_floats<WeightFormat::kF16, float_element<PlainF16>>(),
                of_floats<WeightFormat::kBF16, float_element<PlainBF16>>(),
                of_floats<WeightFormat::kFP8, float_element<ScaledFP8>>(),
                of_integers<WeightFormat::kQ8_0, PanelQ8_0>(), of_integers<WeightFormat::kQ4_0, PanelQ4_0>(),
                of_integers<WeightFormat::kQ4_K, PanelQ4_K>(), of_integers<WeightFormat::kQ5_K, PanelQ5_K>(),
                of_integers<WeightFormat::kQ6_K, PanelQ6_K>(), of_integers<WeightFormat::kInt8, PanelInt8>(),
                of_integers<WeightFormat::kInt4, PanelInt4>()},
    .encode = {encode_f32, encode_bf16, encode_q8},
    .silu_mul = silu_mul,
};

}  // namespace

const KernelTable* generic_packed() { return &kPart; }

}  // namespace twofold::kernels
