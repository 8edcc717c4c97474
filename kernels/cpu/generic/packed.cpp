// The scalar kernels of packed weights: the arithmetic that the vector levels repeat bit for bit.
//
// For one output element, F starting at +0 and fma rounding once:
//
//   f32, f16, bf16   P = fma(x, w, P) over 64 columns from +0; F = F + P; and so on
//   fp8              the same with w * 2^-8 (the bits of e4m3 in the place of an f16); F = fma(P, scale * 256, F)
//
// and of integers, acc being the exact sum of (u - zero) * q over a run of 32 columns, xs the scale of the
// run's activations, sum the sum of their q, by where the format's scales belong:
//
//   kRun     F = fma(acc * scale, xs, F); with minima F = fma(xs * sum, min, F)
//   kBlock   t = acc_0 * xs_0, then t = fma(acc_i, xs_i, t); F = fma(t, scale, F); with minima (blocks of two runs)
//            F = fma(xs_0 * sum_0 + xs_1 * sum_1, min, F)
//   kHalf    F = fma((acc_0 * sub_0 + acc_1 * sub_1) * scale, xs, F), acc_0 of the first 16 columns; sub are the
//            integers that the block's scale multiplies, and what they make stays below 2^24: any order is exact. Or
//            they are floats of 4 bits: the products are exact, their sum is rounded once. With
//            minima, sum_0 being the sum of the first 16 q, of the product before xs:
//            P = fma(sum_0 * sub_min_0 + sum_1 * sub_min_1, min, P)
//
// Of rows with one scale, acc being the exact sum over all columns: (acc * scale) * xs, xs the token's.
//
// Multiplying the integer sums by the weights' scale first lets every operand but one be a register or a
// broadcast from memory in the vector kernels.
#include <bit>
#include <cmath>

#include "../../formats/one_row.h"
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr int kPartialColumns = 64;

template <class Format>
float float_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  constexpr int64_t kColumns = Format::kPanelColumns;
  const float* values = static_cast<const float*>(x);
  const int64_t end = (K + kColumns - 1) / kColumns * kColumns;
  float total = 0.0f;
  for (int64_t begin = 0; begin < end; begin += kPartialColumns) {
    float partial = 0.0f;
    for (int64_t k = begin; k < end && k < begin + kPartialColumns; ++k) {
      const uint8_t* block = panel + k / kColumns * Format::kPanelBytes;
      const float weight = Format::weight(element_bits<Format>(block, row, k % kColumns));
      partial = std::fma(values[k], weight * (1.0f / Format::kFactor), partial);
    }
    if constexpr (Format::kHeaderBytes > 0) {
      const uint8_t* block = panel + begin / kColumns * Format::kPanelBytes;
      total = std::fma(partial, load_as<float>(block + 4 * row) * Format::kFactor, total);
    } else {
      total += partial;
    }
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

// The exact sum of (u - zero) * q over `count` columns.
float product(const uint8_t* u, const int8_t* q, int zero, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += (u[i] - zero) * q[i];
  return static_cast<float>(sum);
}

// F after one panel block.
template <class Format>
float add_block(const uint8_t* block, int row, const Q8Runs& x, float F) {
  float of_block = 0.0f;
  for (int run = 0; run < Format::kRuns; ++run) {
    uint8_t u[kRunColumns];
    run_values<Format>(block, row, run, u);
    const int8_t* q = x.q + kRunColumns * run;
    if constexpr (Format::kScale == ScaleOf::kHalf) {
      const auto sub = [&](int half) {
        if constexpr (has_sub_pairs<Format>) {
          return OneRow::pair_low(block + Format::sub_at(run, 0) + 2 * row, half);
        } else {
          return sub_scale<OneRow, Format::kSub>(block + Format::sub_at(run, half) + row);
        }
      };
      const float exact =
          product(u, q, Format::kZero, 16) * sub(0) + product(u + 16, q + 16, Format::kZero, 16) * sub(1);
      float of_run = exact * Format::template block_scale<OneRow>(block, row);
      if constexpr (Format::kMin) {
        const uint8_t* pair = block + Format::sub_at(run, 0) + 2 * row;
        const float least = OneRow::pair_high(pair, 0) * static_cast<float>(x.sum16[2 * run]) +
                            OneRow::pair_high(pair, 1) * static_cast<float>(x.sum16[2 * run + 1]);
        of_run = std::fma(least, Format::template block_min<OneRow>(block, row), of_run);
      }
      F = std::fma(of_run, x.scale[run], F);
    } else {
      const float acc = product(u, q, Format::kZero, kRunColumns);
      if constexpr (Format::kScale == ScaleOf::kBlock) {
        of_block = run == 0 ? acc * x.scale[run] : std::fma(acc, x.scale[run], of_block);
      } else {
        F = std::fma(acc * Format::template scale<OneRow>(block, run, row), x.scale[run], F);
        if constexpr (Format::kMin) {
          F = std::fma(x.scale[run] * x.sum(run), Format::template min<OneRow>(block, run, row), F);
        }
      }
    }
  }
  if constexpr (Format::kScale == ScaleOf::kBlock) {
    F = std::fma(of_block, Format::template scale<OneRow>(block, 0, row), F);
    if constexpr (Format::kMin) {
      static_assert(Format::kRuns == 2);
      const float sums = x.scale[0] * x.sum(0) + x.scale[1] * x.sum(1);
      F = std::fma(sums, Format::template min<OneRow>(block, 0, row), F);
    }
  }
  return F;
}

template <class Format>
float integer_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  const Q8Runs all(x, K);
  float F = 0.0f;
  for (int64_t b = 0; b * Format::kPanelColumns < K; ++b) {
    F = add_block<Format>(panel + b * Format::kPanelBytes, row, Q8Runs(all, b * Format::kRuns), F);
  }
  return F;
}

template <class Format>
float channel_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  const int8_t* q = static_cast<const int8_t*>(x);
  int32_t sum = 0;
  for (int64_t k = 0; k < K; k += kRunColumns) {
    uint8_t u[kRunColumns];
    run_values<Format>(panel + k / Format::kPanelColumns * Format::kPanelBytes, row,
                       static_cast<int>(k % Format::kPanelColumns / kRunColumns), u);
    for (int i = 0; i < kRunColumns; ++i) sum += (u[i] - Format::kZero) * q[k + i];
  }
  const float of_weights = static_cast<float>(sum) * Format::template scale<OneRow>(panel, 0, row);
  return of_weights * load_as<float>(q + activation_columns(K));
}

using Element = float (*)(const uint8_t* panel, int row, const void* x, int64_t K);

template <class Format, Element Of>
void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M, int N,
            int K) {
  for (int n = 0; n < N; ++n) {
    const uint8_t* panel =
        static_cast<const uint8_t*>(panels) + n / kPanelRows * panel_bytes(kNumberOf<Format>, K);
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

// Q8 scale from the bits of the largest magnitude.
struct Q8Scale {
  float inverse, scale;

  explicit Q8Scale(uint32_t peak) {
    const float amax = std::bit_cast<float>(peak);
    const bool finite = peak < 0x7f800000u, zero = finite && amax < kSmallestQ8;
    inverse = finite && !zero ? 127.0f / amax : 0.0f;
    scale = !finite ? std::bit_cast<float>(0x7fc00000u) : zero ? 0.0f : amax / 127.0f;
  }
  int8_t rounded(float x) const {
    return inverse != 0 ? static_cast<int8_t>(std::nearbyint(x * inverse)) : int8_t{0};
  }
};

// One run of at most 32 columns; zeros follow up to 32.
void encode_q8_run(const float* x, int count, int8_t* q, float* scale, int32_t* sum16) {
  uint32_t peak = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    peak = magnitude > peak ? magnitude : peak;
  }
  const Q8Scale of_run(peak);
  *scale = of_run.scale;
  sum16[0] = sum16[1] = 0;
  for (int i = 0; i < kRunColumns; ++i) {
    q[i] = i < count ? of_run.rounded(x[i]) : int8_t{0};
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

void encode_q8_token(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int, int, int K) {
  const int64_t P = activation_columns(K);
  for (int m = 0; m < M; ++m) {
    int8_t* q = reinterpret_cast<int8_t*>(static_cast<char*>(rows) + m * row_bytes);
    const float* values = x + m * ldx;
    uint32_t peak = 0;
    for (int k = 0; k < K; ++k) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(values[k]) & 0x7fffffffu;
      peak = magnitude > peak ? magnitude : peak;
    }
    const Q8Scale scale(peak);
    int32_t sum = 0;
    for (int64_t k = 0; k < P; ++k) {
      q[k] = k < K ? scale.rounded(values[k]) : int8_t{0};
      sum += q[k];
    }
    store_as(q + P, scale.scale);
    store_as(q + P + 4, sum);
  }
}

template <ExpertActivation kActivation>
void gated_rows(const float* gate, const float* up, float* h, int n) {
  const auto exponential = [](float v) { return std::exp(v); };
  for (int i = 0; i < n; ++i) h[i] = gated(kActivation, gate[i], up[i], exponential);
}

constexpr KernelTable make_part() {
  KernelTable part{.encode = {encode_f32, encode_bf16, encode_q8, encode_q8_token},
                   .gated = {gated_rows<ExpertActivation::kSilu>, gated_rows<ExpertActivation::kSwigluOai>,
                             gated_rows<ExpertActivation::kGeluTanh>}};
  for_each_format([&]<class Format>(Format) {
    FormatKernels& kernels = part.formats[static_cast<int>(kNumberOf<Format>)];
    if constexpr (is_per_channel<Format>) {
      kernels = {ActivationKind::kQ8Token, matmul<Format, channel_element<Format>>, nullptr};
    } else if constexpr (is_integer<Format>) {
      kernels = {ActivationKind::kQ8, matmul<Format, integer_element<Format>>, nullptr};
    } else {
      kernels = {ActivationKind::kF32, matmul<Format, float_element<Format>>, nullptr};
    }
  });
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* generic_packed() { return &kPart; }

}  // namespace twofold::kernels
