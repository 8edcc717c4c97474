// The scalar kernels of packed weights: the arithmetic that the vector levels repeat bit for bit.
//
// For one output element, F starting at +0 and fma rounding once:
//
//   f32, f16, bf16   P = fma(x, w, P) over 64 columns from +0; F = F + P; and so on
//   fp8              the same with w * 2^-8 (the bits of e4m3 in the place of an f16); F = fma(P, scale * 256, F)
//
// and for integers, acc being the exact sum of (u - zero) * q over a subblock of 32 columns, xs the scale of the
// subblock's activations, sum the sum of their q, by the kind of the format's scales (twofold/formats/scales.h):
//
//   PerSubblock   F = fma(acc * scale, xs, F); with minima F = fma(xs * sum, min, F)
//   PerBlock t = acc_0 * xs_0, then t = fma(acc_i, xs_i, t); F = fma(t, scale, F); with minima (blocks of two subblocks)
//            F = fma(xs_0 * sum_0 + xs_1 * sum_1, min, F)
//   PerHalf  F = fma((acc_0 * sub_0 + acc_1 * sub_1) * scale, xs, F), acc_0 of the first 16 columns; sub are the
//            integers that the block's scale multiplies, and what they make stays below 2^24: any order is exact. Or
//            they are floats of 4 bits: the products are exact, their sum is rounded once. With
//            minima, sum_0 being the sum of the first 16 q, of the product before xs:
//            P = fma(sum_0 * sub_min_0 + sum_1 * sub_min_1, min, P)
//
// Rows with one scale, acc being the exact sum over all columns: (acc * scale) * xs, xs the token's.
//
// Multiplying the integer sums by the weights' scale first lets every operand but one be a register or a
// broadcast from memory in the vector kernels.
#include <bit>
#include <cmath>

#include "../../formats/one_row.h"
#include "encode.h"
#include "levels.h"
#include "unpack_panel.h"

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

// The exact sum of (u - zero) * q over `count` columns.
float product(const uint8_t* u, const int8_t* q, int zero, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += (u[i] - zero) * q[i];
  return static_cast<float>(sum);
}

// The sum of a subblock, times the numbers that the block's scale multiplies where both halves have one.
template <class Format>
float subblock_sum(const uint8_t* block, int row, int subblock, const int8_t* q) {
  uint8_t u[kSubblockColumns];
  subblock_values<Format>(block, row, subblock, u);
  if constexpr (Format::Kind::kSums == 1) {
    return product(u, q, Format::kZero, kSubblockColumns);
  } else {
    return product(u, q, Format::kZero, 16) * numbers_of<OneRow, Format>(block, subblock, 0, row) +
           product(u + 16, q + 16, Format::kZero, 16) * numbers_of<OneRow, Format>(block, subblock, 1, row);
  }
}

// The total after one panel block. x: the block's first subblock.
template <class Format>
float add_block(const uint8_t* block, int row, const int8_t* q, const TokenSubblock& x, float total) {
  using Kind = typename Format::Kind;
  float of_block = 0.0f;
  for (int subblock = 0; subblock < Format::kSubblocks; ++subblock) {
    const float sum = subblock_sum<Format>(block, row, subblock, q + kSubblockColumns * subblock);
    if constexpr (Kind::kSumsOfBlock) {
      of_block = Kind::template add<OneRow>(subblock, sum, x.at(subblock), of_block);
    } else {
      const float scaled = sum * subblock_scale<OneRow, Format>(block, subblock, row);
      const auto least = Kind::template Least<OneRow, Format>::of(block, subblock, row);
      total = least.join(scaled, x.at(subblock), total);
    }
  }
  if constexpr (Kind::kSumsOfBlock) {
    total = Kind::template join<OneRow, Format>(of_block, Format::template scale<OneRow>(block, 0, 0, row),
                                                Format::template min<OneRow>(block, 0, 0, row), x, total);
  }
  return total;
}

template <class Format>
float integer_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  const int8_t* q = static_cast<const int8_t*>(x);
  const float* scale = reinterpret_cast<const float*>(q + activation_columns(K));
  const int32_t* sum16 = reinterpret_cast<const int32_t*>(scale + activation_columns(K) / 32);
  float total = 0.0f;
  for (int64_t k = 0; k < K; k += Format::kPanelColumns, panel += Format::kPanelBytes) {
    float sums[Format::kSubblocks];
    int32_t halves[Format::kSubblocks];
    const int64_t first = k / kSubblockColumns;
    for (int subblock = 0; subblock < Format::kSubblocks; ++subblock) {
      const int32_t* sum = sum16 + 2 * (first + subblock);
      sums[subblock] = scale[first + subblock] * static_cast<float>(sum[0] + sum[1]);
      halves[subblock] = static_cast<int32_t>((sum[0] & 0xffff) | static_cast<uint32_t>(sum[1]) << 16);
    }
    total = add_block<Format>(panel, row, q + k, {scale + first, sums, halves}, total);
  }
  return total;
}

template <class Format>
float channel_element(const uint8_t* panel, int row, const void* x, int64_t K) {
  const int8_t* q = static_cast<const int8_t*>(x);
  int32_t sum = 0;
  for (int64_t k = 0; k < K; k += kSubblockColumns) {
    uint8_t u[kSubblockColumns];
    subblock_values<Format>(panel + k / Format::kPanelColumns * Format::kPanelBytes, row,
                            static_cast<int>(k % Format::kPanelColumns / kSubblockColumns), u);
    for (int i = 0; i < kSubblockColumns; ++i) sum += (u[i] - Format::kZero) * q[k + i];
  }
  const float of_weights = static_cast<float>(sum) * Format::template scale<OneRow>(panel, 0, 0, row);
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

// A vector of one float, for encode.h.
struct OneFloat {
  using F = float;
  static constexpr int kLanes = 1;
  static F load(const float* p) { return *p; }
  static F load_first(const float*, int) { return 0.0f; }
  static void store(float* p, F v) { *p = v; }
  static void store_bf16(uint16_t* p, F v) { *p = bf16_of_float(v); }
  // The bits of the largest magnitude.
  static int32_t peak_bits32(const float* x) {
    int32_t peak = 0;
    for (int i = 0; i < kSubblockColumns; ++i) {
      const int32_t magnitude = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
      peak = magnitude > peak ? magnitude : peak;
    }
    return peak;
  }
  static void quantise32(const float* x, float inverse, int8_t* q, int32_t* sums) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < kSubblockColumns; ++i)
      sums[i / 16] += q[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
  }
};

template <ExpertActivation kActivation>
void gated_rows(const float* gate, const float* up, float* h, int n, float limit) {
  const auto exponential = [](float v) { return std::exp(v); };
  for (int i = 0; i < n; ++i) h[i] = gated(kActivation, limit, gate[i], up[i], exponential);
}

// OneRow with what unpack_panel.h asks for.
struct StoredRow : OneRow {
  static void store(uint8_t* p, I v) { store_as(p, v); }
  static void store(float* p, F v) { *p = v; }
};

constexpr KernelTable make_part() {
  KernelTable part{
      .encode = {Encode<OneFloat>::f32, Encode<OneFloat>::bf16, Encode<OneFloat>::q8,
                 Encode<OneFloat>::q8_token},
      .gated = {gated_rows<ExpertActivation::kSilu>, gated_rows<ExpertActivation::kSwigluOai>,
                gated_rows<ExpertActivation::kGeluTanh>, gated_rows<ExpertActivation::kSiluOfLimited>}};
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
  add_unpacking<StoredRow, false>(part);
  add_unpacking<StoredRow, true>(part);
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* generic_packed() { return &kPart; }

}  // namespace twofold::kernels
