// Source rows and rows of panels as float32: the reference for every kernel test.
#include "one_row.h"

namespace twofold::kernels {
namespace {

// out[i] = scale(half) * (u[i] - zero) + min(half) for a subblock, whose halves are 16 columns.
template <class Format, class Scale, class Min>
void put_run(const uint8_t* u, const Scale& scale, const Min& min, float* out) {
  for (int half = 0; half < 2; ++half) {
    const float factor = scale(half);
    float least = 0.0f;
    if constexpr (Format::kMin) least = min(half);
    for (int i = 16 * half; i < 16 * half + 16; ++i) {
      const float value = factor * static_cast<float>(u[i] - Format::kZero);
      out[i] = Format::kMin ? value + least : value;
    }
  }
}

template <class Format>
void dequantise_integers(const uint8_t* row, const void* separate, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k += kSubblockColumns) {
    const SourceBlock source = source_block<Format>(row, separate, k / Format::kBlockColumns);
    const int subblock = static_cast<int>(k % Format::kBlockColumns / kSubblockColumns);
    uint8_t u[kSubblockColumns];
    Format::values(source, subblock, u);
    if constexpr (has_table<Format>) {
      for (uint8_t& value : u) value = Format::kTable[value];
    }
    put_run<Format>(
        u, [&](int half) { return Format::source_scale(source, subblock, half); },
        [&](int half) { return Format::source_min(source, subblock, half); }, out + k);
  }
}

template <class Format>
void unpack_integers(const uint8_t* panel, int row, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k += kSubblockColumns) {
    const uint8_t* block = panel + k / Format::kPanelColumns * Format::kPanelBytes;
    const int subblock = static_cast<int>(k % Format::kPanelColumns / kSubblockColumns);
    uint8_t u[kSubblockColumns];
    subblock_values<Format>(block, row, subblock, u);
    const auto scale = [&](int half) {
      if constexpr (requires { Format::exact_half_scale(block, subblock, half, row); }) {
        return Format::exact_half_scale(block, subblock, half, row);
      } else {
        return Format::template scale<OneRow>(block, subblock, half, row);
      }
    };
    put_run<Format>(
        u, scale, [&](int half) { return Format::template min<OneRow>(block, subblock, half, row); },
        out + k);
  }
}

}  // namespace

void dequantise_row(WeightFormat format, const void* row, const void* scales, int64_t columns, float* out) {
  const uint8_t* bytes = static_cast<const uint8_t*>(row);
  with_format(format, [&]<class Format>(Format) {
    if constexpr (is_integer<Format>) {
      dequantise_integers<Format>(bytes, scales, columns, out);
    } else {
      for (int64_t k = 0; k < columns; ++k) {
        uint32_t bits = 0;
        std::memcpy(&bits, bytes + k * Format::kBlockBytes, Format::kBlockBytes);
        out[k] = Format::value(bits);
        if constexpr (Format::kScaleGrid > 0)
          out[k] *= static_cast<const float*>(scales)[k / Format::kScaleGrid];
      }
    }
  });
}

void unpack_row(WeightFormat format, const void* panel, int row, int64_t columns, float* out) {
  const uint8_t* from = static_cast<const uint8_t*>(panel);
  with_format(format, [&]<class Format>(Format) {
    if constexpr (is_integer<Format>) {
      unpack_integers<Format>(from, row, columns, out);
    } else {
      for (int64_t k = 0; k < columns; ++k) {
        const uint8_t* block = from + k / Format::kPanelColumns * Format::kPanelBytes;
        out[k] = Format::value(element_bits<Format>(block, row, k % Format::kPanelColumns));
        if constexpr (Format::kScaleGrid > 0) out[k] *= load_as<float>(block + 4 * row);
      }
    }
  });
}

}  // namespace twofold::kernels
