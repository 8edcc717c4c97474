// A random matrix in any format, packed, with its weights as floats, and activations encoded as kernels take
// them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "number_formats.h"
#include "source_scales.h"
#include "twofold/packed_kernels.h"
#include "twofold/weight_format.h"

namespace test {

using twofold::kernels::ActivationKind;
using twofold::kernels::WeightFormat;

struct PackedMatrix {
  WeightFormat format;
  int rows;
  int columns;
  std::vector<uint64_t> memory;  // aligned for copies of 16 bytes
  std::vector<float> weights;    // [rows][columns], what was packed

  PackedMatrix(WeightFormat which, int num_rows, int num_columns, uint32_t seed)
      : format(which), rows(num_rows), columns(num_columns) {
    namespace k = twofold::kernels;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const size_t row_bytes = size_t(k::source_row_bytes(format, columns));
    std::vector<uint8_t> source(row_bytes * size_t(rows));
    std::vector<float> scales(size_t(rows) * size_t((columns + 127) / 128), 1.0f);
    for (float& scale : scales) scale = 0.01f * (1.0f + std::abs(normal(random)));
    for (int r = 0; r < rows; ++r) {
      uint8_t* row = source.data() + size_t(r) * row_bytes;
      fill_row(row, row_bytes, random);
    }
    const auto scales_of = [&](int r) { return scales.data() + size_t(r) * size_t((columns + 127) / 128); };
    weights.resize(size_t(rows) * size_t(columns));
    for (int r = 0; r < rows; ++r)
      k::dequantise_row(format, source.data() + size_t(r) * row_bytes,
                        k::layout_of(format).scale_grid ? scales_of(r) : nullptr, columns,
                        weights.data() + size_t(r) * size_t(columns));
    const size_t panel = size_t(k::panel_bytes(format, columns));
    const size_t bytes = panel * size_t(k::num_panels(rows));
    memory.assign(bytes / 8 + 16, 0);
    for (int p = 0; p < k::num_panels(rows); ++p) {
      const void* pointers[32];
      const void* of_rows[32];
      const int count = std::min(32, rows - 32 * p);
      for (int r = 0; r < count; ++r) {
        pointers[r] = source.data() + size_t(32 * p + r) * row_bytes;
        of_rows[r] = scales_of(32 * p + r);
      }
      k::pack_panel(format, pointers, k::layout_of(format).scale_grid ? of_rows : nullptr, count, columns,
                    data() + panel * size_t(p));
    }
  }

  // Any bytes are weights, but the scales among them are to be small numbers.
  void fill_row(uint8_t* row, size_t row_bytes, std::mt19937& random) const {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < row_bytes; ++i) row[i] = uint8_t(random());
    const auto small = [&] { return uint16_t(0x2000 + random() % 0x0800); };
    twofold::kernels::with_format(format, [&]<class Format>(Format) {
      for (size_t at = 0; at < row_bytes; at += size_t(Format::kBlockBytes)) {
        const float value = normal(random) * 0.1f + 0.02f;
        if constexpr (requires { Format::exact_scale(1.0f, 1.0f); }) {
          const float of_row = random() % 2 == 0 ? 0.01f * (1.0f + std::abs(value)) : -100.0f - value;
          if (at == 0) std::memcpy(row, &of_row, 4);
        } else if constexpr (Format::kSeparateBytes > 0) {
          row[at] = uint8_t(120 + random() % 3);
        } else if constexpr (twofold::kernels::is_per_channel<Format>) {
          const uint16_t scale = small();
          std::memcpy(row + at + Format::kScaleAt, &scale, 2);
        } else if constexpr (twofold::kernels::is_integer<Format>) {
          const uint16_t scale = small(), min = Format::kMin ? small() : scale;
          put_scales<Format>(row + at, scale, min);
        } else if constexpr (Format::kScaleGrid > 0) {
          if ((row[at] & 0x7f) == 0x7f) row[at] ^= 1;  // no NaN
        } else {
          Format::quantise(&value, nullptr, row + at);
        }
      }
    });
  }

  uint8_t* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<uint8_t*>((at + 63) / 64 * 64);
  }
  const uint8_t* data() const { return const_cast<PackedMatrix*>(this)->data(); }
  const uint8_t* panel(int p) const { return data() + p * twofold::kernels::panel_bytes(format, columns); }
  float weight(int r, int c) const { return weights[size_t(r) * size_t(columns) + size_t(c)]; }
};

// Encoded rows, as encode_kernel makes them, and what they stand for.
struct EncodedRows {
  int64_t row_bytes;
  std::vector<uint8_t> bytes;
  std::vector<float> values;  // [tokens][columns]

  EncodedRows(ActivationKind kind, int tokens, int columns, uint32_t seed) {
    using namespace twofold;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    row_bytes = kernels::activation_row_bytes(kind, columns);
    bytes.assign(size_t(row_bytes) * size_t(tokens), 0);
    const int P = int(kernels::activation_columns(columns));
    for (int t = 0; t < tokens; ++t) {
      uint8_t* row = bytes.data() + size_t(t) * size_t(row_bytes);
      std::vector<float> x(size_t(P), 0.0f);
      for (int c = 0; c < columns; ++c)
        x[size_t(c)] = cuda::float_of_bits(uint32_t(cuda::bf16_of_float(normal(random))) << 16);
      if (kind == ActivationKind::kF32) std::memcpy(row, x.data(), size_t(P) * 4);
      for (int c = 0; c < P && kind == ActivationKind::kBF16; ++c) {
        const uint16_t bits = cuda::bf16_of_float(x[size_t(c)]);
        std::memcpy(row + 2 * c, &bits, 2);
      }
      for (int run = 0; run < P / 32 && kind == ActivationKind::kQ8; ++run) {
        float largest = 0;
        for (int c = 0; c < 32; ++c) largest = std::max(largest, std::abs(x[size_t(32 * run + c)]));
        const float scale = cuda::q8_scale(largest);
        std::memcpy(row + P + 4 * run, &scale, 4);
        int32_t sums[2] = {0, 0};
        for (int c = 0; c < 32; ++c) {
          const int q = cuda::q8_of(x[size_t(32 * run + c)], largest);
          row[32 * run + c] = uint8_t(int8_t(q));
          sums[c / 16] += q;
          x[size_t(32 * run + c)] = float(q) * scale;
        }
        std::memcpy(row + P + P / 8 + 8 * run, sums, 8);
      }
      values.insert(values.end(), x.begin(), x.begin() + columns);
    }
  }
};

inline bool close(double value, double expected, double magnitude) {
  return std::abs(value - expected) <= 2e-5 * magnitude + 1e-6;
}

}  // namespace test
