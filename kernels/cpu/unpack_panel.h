// A panel's weights as rows of float32, as unpack_row() gives them. The words of a row's slices are gathered first, so that
// the compiler vectorises the loops over a row's columns. Minima are added with one rounding where a level has that
// instruction. Anonymous namespace, as subblock_scales.h.
#pragma once
#include <cstdint>

#include "twofold/kernels.h"

namespace twofold::kernels {
namespace {

// Rows of 32-bit words, from slices that begin `stride` bytes after each other.
template <int kSlices>
struct SliceRows {
  alignas(64) uint32_t words[kPanelRows][kSlices];

  SliceRows(const uint8_t* slices, int64_t stride) {
    for (int s = 0; s < kSlices; ++s) {
      for (int r = 0; r < kPanelRows; ++r) words[r][s] = load_as<uint32_t>(slices + s * stride + 4 * r);
    }
  }
};

// V supplies the integers of quantised formats and is not used for others.
template <class V, class Format>
struct UnpackedPanel {
  static constexpr int kSubblockSlices = kSubblockColumns / 4;
  static constexpr int kHalves = 2, kHalfColumns = kSubblockColumns / kHalves;

  static void floats(const uint8_t* panel, int64_t columns, float* out) {
    constexpr int kOfSlice = Format::kSliceColumns, kSlices = 16, kBits = 32 / kOfSlice;
    constexpr int64_t kColumns = kSlices * kOfSlice;
    for (int64_t k = 0; k < columns; k += kColumns) {
      const uint8_t* const block = panel + k / Format::kPanelColumns * Format::kPanelBytes;
      const uint8_t* const slices =
          block + Format::kHeaderBytes + k % Format::kPanelColumns / kOfSlice * kSliceBytes;
      const int64_t here = columns - k < kColumns ? columns - k : kColumns;
      if (here < kColumns) return few(block, slices, here, columns, out + k);
      const SliceRows<kSlices> rows(slices, kSliceBytes);
      for (int r = 0; r < kPanelRows; ++r) {
        float* const to = out + r * columns + k;
        float scale = 1.0f;
        if constexpr (Format::kScaleGrid > 0) scale = load_as<float>(block + 4 * r);
        for (int s = 0; s < kSlices; ++s) {
          for (int c = 0; c < kOfSlice; ++c) {
            const uint32_t bits = rows.words[r][s] >> (c * kBits) & (0xffffffffu >> (32 - kBits));
            to[s * kOfSlice + c] = scaled(Format::value(bits), scale);
          }
        }
      }
    }
  }

  static void integers(const uint8_t* panel, int64_t columns, float* out) {
    for (int64_t k = 0; k < columns; k += kSubblockColumns) {
      const uint8_t* const block = panel + k / Format::kPanelColumns * Format::kPanelBytes;
      const int subblock = static_cast<int>(k % Format::kPanelColumns / kSubblockColumns);
      alignas(64) uint8_t bytes[kSubblockSlices * kSliceBytes];
      for (int slice = 0; slice < kSubblockSlices; ++slice) {
        for (int g = 0; g < kPanelRows / V::kLanes; ++g)
          V::store(bytes + slice * kSliceBytes + g * V::kBytes,
                   Format::template bytes<V>(block, subblock / Format::kGroupSubblocks,
                                             subblock % Format::kGroupSubblocks, slice, g));
      }
      const SliceRows<kSubblockSlices> rows(bytes, kSliceBytes);
      alignas(64) float scale[kHalves][kPanelRows], least[kHalves][kPanelRows];
      for (int half = 0; half < kHalves; ++half) scales(block, subblock, half, scale[half], least[half]);
      for (int r = 0; r < kPanelRows; ++r) {
        alignas(32) uint8_t u[kSubblockColumns];
        __builtin_memcpy(u, rows.words[r], sizeof u);
        for (int half = 0; half < kHalves; ++half) {
          float* const to = out + r * columns + k + half * kHalfColumns;
          const float factor = scale[half][r], added = Format::kMin ? least[half][r] : 0.0f;
          for (int i = 0; i < kHalfColumns; ++i) {
            const float value = factor * static_cast<float>(u[half * kHalfColumns + i] - Format::kZero);
            to[i] = Format::kMin ? value + added : value;
          }
        }
      }
    }
  }

 private:
  static float scaled(float value, float scale) { return Format::kScaleGrid > 0 ? value * scale : value; }

  // The last columns, fewer than a step's.
  static void few(const uint8_t* block, const uint8_t* slices, int64_t count, int64_t columns, float* out) {
    constexpr int kOfSlice = Format::kSliceColumns, kBits = 32 / kOfSlice;
    for (int r = 0; r < kPanelRows; ++r) {
      float scale = 1.0f;
      if constexpr (Format::kScaleGrid > 0) scale = load_as<float>(block + 4 * r);
      for (int64_t c = 0; c < count; ++c) {
        const uint32_t word = load_as<uint32_t>(slices + c / kOfSlice * kSliceBytes + 4 * r);
        const uint32_t bits = word >> (c % kOfSlice * kBits) & (0xffffffffu >> (32 - kBits));
        out[r * columns + c] = scaled(Format::value(bits), scale);
      }
    }
  }

  static void scales(const uint8_t* block, int subblock, int half, float* scale, float* least) {
    if constexpr (requires { Format::exact_half_scale(block, subblock, half, 0); }) {
      for (int r = 0; r < kPanelRows; ++r) scale[r] = Format::exact_half_scale(block, subblock, half, r);
    } else {
      for (int g = 0; g < kPanelRows / V::kLanes; ++g)
        V::store(scale + g * V::kLanes, Format::template scale<V>(block, subblock, half, g));
    }
    if constexpr (Format::kMin) {
      for (int g = 0; g < kPanelRows / V::kLanes; ++g)
        V::store(least + g * V::kLanes, Format::template min<V>(block, subblock, half, g));
    }
  }
};

template <class V, bool kIntegers>
constexpr void add_unpacking(KernelTable& part) {
  for_each_format([&]<class Format>(Format) {
    auto& unpack = part.unpack[static_cast<int>(kNumberOf<Format>)];
    if constexpr (is_integer<Format> && kIntegers) unpack = UnpackedPanel<V, Format>::integers;
    if constexpr (!is_integer<Format> && !kIntegers) unpack = UnpackedPanel<V, Format>::floats;
  });
}

}  // namespace
}  // namespace twofold::kernels
