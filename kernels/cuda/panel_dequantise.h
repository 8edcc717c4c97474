// Weights of a panel as floats, 16 columns of four rows at a time: how prefill brings them to tensor cores.
#pragma once
#include <cstdint>

#include "panel_reading.h"

namespace twofold::cuda {

// out[c][r] = weight of row 4 quad + r, column first + c; first is a multiple of 16 within the panel's
// blocks.
template <WeightFormat F>
TWOFOLD_HD void dequantise_16(const uint8_t* panel, int first, int quad, float (&out)[16][kRowsOfLane]) {
  using Format = FormatOf<F>;
  const uint8_t* block = panel + int64_t(first / Format::kPanelColumns) * Format::kPanelBytes;
  if constexpr (!kernels::is_integer<Format>) {
    constexpr int kColumns = Format::kSliceColumns;
    Words scales;
    if constexpr (Format::kHeaderBytes > 0) scales = load_words(block + 16 * quad);
    const uint8_t* slices =
        block + Format::kHeaderBytes + first % Format::kPanelColumns / kColumns * kSliceBytes + 16 * quad;
#pragma unroll
    for (int s = 0; s < 16 / kColumns; ++s) {
      const Words words = load_words(slices + s * kSliceBytes);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float& value = out[kColumns * s + c][r];
          value = weight_of<Format>(words.w[r], c);
          if constexpr (Format::kHeaderBytes > 0) value = float_of_bits(scales.w[r]) * value;
        }
      }
    }
  } else {
    const int column = first % Format::kPanelColumns, subblock = column / 32;
    const int group = subblock / Format::kGroupSubblocks, in_group = subblock % Format::kGroupSubblocks;
    const int half = column % 32 / 16;
    const Lane::F scale = Format::template scale<Lane>(block, subblock, half, quad);
    const Lane::F min = Format::template min<Lane>(block, subblock, half, quad);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const Words words = Format::template bytes<Lane>(block, group, in_group, column % 32 / 4 + s, quad);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t byte = (words.w[r] >> (8 * j)) & 0xffu;
          if constexpr (Format::kMin) {
            out[4 * s + j][r] = fused(scale.v[r], float(byte), min.v[r]);
          } else {
            out[4 * s + j][r] = scale.v[r] * float(int(byte) - Format::kZero);
          }
        }
      }
    }
  }
}

}  // namespace twofold::cuda
