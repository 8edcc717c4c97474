// Source rows and rows of panels as float32: what every kernel is tested against.
#include "one_row.h"

namespace twofold::kernels {
namespace {

// out[i] = scale * (u[i] - zero) + min over a run; scale_of(half): of 16 columns.
template <class Format, class ScaleOfHalf>
void put_run(const uint8_t* u, const ScaleOfHalf& scale_of, float min, float* out) {
  for (int i = 0; i < kRunColumns; ++i) {
    const float value = scale_of(i / 16) * static_cast<float>(u[i] - Format::kZero);
    out[i] = Format::kMin ? value + min : value;
  }
}

template <class Format>
void look_up(uint8_t* u) {
  for (int i = 0; i < kRunColumns; ++i) u[i] = Format::kTable[u[i]];
}

template <class Format>
void dequantise_integers(const uint8_t* row, int64_t columns, float* out) {
  for (int64_t b = 0; b < columns / Format::kBlockColumns; ++b, row += Format::kBlockBytes) {
    for (int run = 0; run < Format::kBlockColumns / kRunColumns; ++run, out += kRunColumns) {
      uint8_t u[kRunColumns];
      Format::values(row, run, u);
      if constexpr (has_table<Format>) look_up<Format>(u);
      if constexpr (Format::kScale == ScaleOf::kHalf) {
        const float scales[2] = {Format::source_half_scale(row, run, 0),
                                 Format::source_half_scale(row, run, 1)};
        put_run<Format>(u, [&](int half) { return scales[half]; }, 0.0f, out);
      } else {
        const float scale = Format::source_scale(row, run);
        float min = 0.0f;
        if constexpr (Format::kMin) min = Format::source_min(row, run);
        put_run<Format>(u, [&](int) { return scale; }, min, out);
      }
    }
  }
}

// Codes of neighbours in a byte, an exponent for each block elsewhere.
template <class Format>
void dequantise_apart(const uint8_t* row, const uint8_t* exponents, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k += kRunColumns, row += Format::kApartBytes) {
    uint8_t u[kRunColumns];
    for (int i = 0; i < kRunColumns; ++i) u[i] = row[i / 2] >> i % 2 * 4 & 0xfu;
    look_up<Format>(u);
    const float scale = half_of_e8m0(*exponents++);
    put_run<Format>(u, [&](int) { return scale; }, 0.0f, out + k);
  }
}

template <class Format>
void dequantise_channels(const uint8_t* row, int64_t columns, float* out) {
  const float scale = Format::source_scale(row, 0);
  const uint8_t* block = row + Format::kRowHeadBytes;
  for (int64_t k = 0; k < columns; k += kRunColumns, block += Format::kBlockBytes) {
    uint8_t u[kRunColumns];
    Format::values(block, 0, u);
    put_run<Format>(u, [&](int) { return scale; }, 0.0f, out + k);
  }
}

// NVFP4: an f32 at the row's head, a scale for 16 columns.
template <class Format>
void dequantise_halves(const uint8_t* row, int64_t columns, float* out) {
  const float of_row = load_as<float>(row);
  const uint8_t* block = row + Format::kRowHeadBytes;
  for (int64_t k = 0; k < columns; k += Format::kBlockColumns, block += Format::kBlockBytes) {
    for (int run = 0; run < Format::kBlockColumns / kRunColumns; ++run) {
      uint8_t u[kRunColumns];
      Format::values(block, run, u);
      look_up<Format>(u);
      put_run<Format>(
          u, [&](int half) { return Format::source_scale_of(block, 2 * run + half, of_row); }, 0.0f,
          out + k + kRunColumns * run);
    }
  }
}

template <class Format>
void unpack_integers(const uint8_t* panel, int row, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k += kRunColumns) {
    const uint8_t* block = panel + k / Format::kPanelColumns * Format::kPanelBytes;
    const int run = static_cast<int>(k % Format::kPanelColumns / kRunColumns);
    uint8_t u[kRunColumns];
    run_values<Format>(block, row, run, u);
    float min = 0.0f;
    if constexpr (Format::kMin) min = Format::template min<OneRow>(block, run, row);
    const auto scale_of = [&](int half) {
      if constexpr (requires { Format::exact_half_scale(block, run, half, row); }) {
        return Format::exact_half_scale(block, run, half, row);
      } else if constexpr (Format::kScale == ScaleOf::kHalf) {
        return Format::template half_scale<OneRow>(block, run, half, row);
      } else {
        return Format::template scale<OneRow>(block, run, row);
      }
    };
    put_run<Format>(u, scale_of, min, out + k);
  }
}

}  // namespace

void dequantise_row(WeightFormat format, const void* row, const void* scales, int64_t columns, float* out) {
  const uint8_t* bytes = static_cast<const uint8_t*>(row);
  with_format(format, [&]<class Format>(Format) {
    if constexpr (is_per_channel<Format>) {
      dequantise_channels<Format>(bytes, columns, out);
    } else if constexpr (requires { Format::kRowHeadBytes; }) {
      dequantise_halves<Format>(bytes, columns, out);
    } else if constexpr (is_integer<Format>) {
      if constexpr (requires { Format::kApartBytes; }) {
        if (scales != nullptr)
          return dequantise_apart<Format>(bytes, static_cast<const uint8_t*>(scales), columns, out);
      }
      dequantise_integers<Format>(bytes, columns, out);
    } else {
      for (int64_t k = 0; k < columns; ++k) {
        uint32_t bits = 0;
        std::memcpy(&bits, bytes + k * Format::kBlockBytes, Format::kBlockBytes);
        out[k] = Format::value(bits);
        if constexpr (requires { Format::kScaleGrid; })
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
        if constexpr (requires { Format::kScaleGrid; }) out[k] *= load_as<float>(block + 4 * row);
      }
    }
  });
}

}  // namespace twofold::kernels
