// Source rows and rows of panels as float32: the reference for every kernel test.
#include "one_row.h"

namespace twofold::kernels {
namespace {

struct ScaleMin {
  float scale, min = 0.0f;
};

// out[i] = scale * (u[i] - zero) + min over a run; of_half(half): those of 16 columns.
template <class Format, class OfHalf>
void put_run(const uint8_t* u, const OfHalf& of_half, float* out) {
  for (int i = 0; i < kRunColumns; ++i) {
    const ScaleMin of = of_half(i / 16);
    const float value = of.scale * static_cast<float>(u[i] - Format::kZero);
    out[i] = Format::kMin ? value + of.min : value;
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
      ScaleMin of[2];
      for (int half = 0; half < 2; ++half) {
        if constexpr (Format::kScale == ScaleOf::kHalf) {
          of[half].scale = Format::source_half_scale(row, run, half);
          if constexpr (Format::kMin) of[half].min = Format::source_half_min(row, run, half);
        } else {
          of[half].scale = Format::source_scale(row, run);
          if constexpr (Format::kMin) of[half].min = Format::source_min(row, run);
        }
      }
      put_run<Format>(u, [&](int half) { return of[half]; }, out);
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
    put_run<Format>(u, [&](int) { return ScaleMin{scale}; }, out + k);
  }
}

template <class Format>
void dequantise_channels(const uint8_t* row, int64_t columns, float* out) {
  const float scale = Format::source_scale(row, 0);
  const uint8_t* block = row + Format::kRowHeadBytes;
  for (int64_t k = 0; k < columns; k += kRunColumns, block += Format::kBlockBytes) {
    uint8_t u[kRunColumns];
    Format::values(block, 0, u);
    put_run<Format>(u, [&](int) { return ScaleMin{scale}; }, out + k);
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
          u, [&](int half) { return ScaleMin{Format::source_scale_of(block, 2 * run + half, of_row)}; },
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
    const auto of_half = [&](int half) {
      ScaleMin of{};
      if constexpr (Format::kScale == ScaleOf::kHalf) {
        if constexpr (requires { Format::exact_half_scale(block, run, half, row); }) {
          of.scale = Format::exact_half_scale(block, run, half, row);
        } else {
          of.scale = Format::template half_scale<OneRow>(block, run, half, row);
        }
        if constexpr (Format::kMin) of.min = Format::template half_min<OneRow>(block, run, half, row);
      } else {
        of.scale = Format::template scale<OneRow>(block, run, row);
        if constexpr (Format::kMin) of.min = Format::template min<OneRow>(block, run, row);
      }
      return of;
    };
    put_run<Format>(u, of_half, out + k);
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
