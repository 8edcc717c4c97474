// Weights of a panel as floats, 16 columns of four rows at a time: how prefill brings them to tensor cores.
#pragma once
#include <cstdint>

#include "panel_reading.h"

namespace twofold::cuda {

// Bits 4 r + j of `planes` (a step's u16 of rows 4 quad ...) added to weight j of each row at bit `at`.
TWOFOLD_HD void add_plane(const uint8_t* planes, int step, int quad, int at, Words& words) {
  const uint32_t bits = load<uint16_t>(planes + 16 * step + 2 * quad);
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) words.w[r] |= spread_bits(bits >> (4 * r), at);
}

// out[c][r] = weight of row 4 quad + r, column first + c; first is a multiple of 16 within the panel's
// blocks.
template <WeightFormat F>
TWOFOLD_HD void dequantise_16(const uint8_t* panel, int first, int quad, float (&out)[16][kRowsOfLane]) {
  constexpr int kBlockBytes = kernels::layout_of(F).panel_block_bytes;
  constexpr int kBlockColumns = kernels::layout_of(F).panel_columns;
  if constexpr (F == WeightFormat::kF32) {
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const Words words = load_words(panel + int64_t(first + c) * kStepBytes + 16 * quad);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) out[c][r] = float_of_bits(words.w[r]);
    }
  } else if constexpr (F == WeightFormat::kF16 || F == WeightFormat::kBF16) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const Words words = load_words(panel + int64_t(first / 2 + s) * kStepBytes + 16 * quad);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        out[2 * s][r] = F == WeightFormat::kBF16 ? bf16_low(words.w[r]) : f16_to_float(words.w[r] & 0xffffu);
        out[2 * s + 1][r] = F == WeightFormat::kBF16 ? bf16_high(words.w[r]) : f16_to_float(words.w[r] >> 16);
      }
    }
  } else {
    const uint8_t* block = panel + int64_t(first / kBlockColumns) * kBlockBytes;
    const int column = first % kBlockColumns;
    float scale[kRowsOfLane], offset[kRowsOfLane];  // value = scale * q + offset
    const uint8_t* steps;                           // of these 16 columns
    bool high_nibbles = false;
    if constexpr (F == WeightFormat::kFP8) {
      const Words scales = load_words(block + 16 * quad);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) scale[r] = float_of_bits(scales.w[r]);
      steps = block + 128 + column / 4 * kStepBytes;
    } else {
      load_scales(block, quad, scale);
      if constexpr (F == WeightFormat::kQ8_0 || F == WeightFormat::kInt8) {
        steps = block + 64 + column / 4 * kStepBytes;
      } else if constexpr (F == WeightFormat::kQ4_0) {
        steps = block + 64;
        high_nibbles = column >= 16;
      } else if constexpr (F == WeightFormat::kInt4) {
        load_scales(block + 64, quad, offset);
        steps = block + 128 + column % 32 / 4 * kStepBytes;
        high_nibbles = column >= 32;
      } else {
        constexpr int kHeader = F == WeightFormat::kQ6_K ? 576 : 640;
        constexpr int kPlanes = F == WeightFormat::kQ6_K ? 512 : F == WeightFormat::kQ5_K ? 256 : 0;
        const int run = column / 32;
        high_nibbles = run % 2 == 1;
        steps =
            block + kHeader + run / 2 * (kPlanes + 8 * kStepBytes) + kPlanes + column % 32 / 4 * kStepBytes;
        if constexpr (F == WeightFormat::kQ6_K) {
          const uint32_t scales = load<uint32_t>(block + 64 + 32 * (column / 16) + 4 * quad);
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r) scale[r] *= float(int8_t(scales >> (8 * r)));
        } else {
          load_scales(block + 64, quad, offset);
          const uint32_t scales = load<uint32_t>(block + 128 + 32 * run + 4 * quad);
          const uint32_t mins = load<uint32_t>(block + 384 + 32 * run + 4 * quad);
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r) {
            scale[r] *= float((scales >> (8 * r)) & 0xffu);
            offset[r] *= -float((mins >> (8 * r)) & 0xffu);
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      Words words = load_words(steps + s * kStepBytes + 16 * quad);
      if constexpr (F == WeightFormat::kQ4_0 || F == WeightFormat::kInt4 || F == WeightFormat::kQ4_K ||
                    F == WeightFormat::kQ5_K || F == WeightFormat::kQ6_K) {
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r)
          words.w[r] = (high_nibbles ? words.w[r] >> 4 : words.w[r]) & 0x0f0f0f0fu;
      }
      if constexpr (F == WeightFormat::kQ5_K || F == WeightFormat::kQ6_K) {
        constexpr int kPlanes = F == WeightFormat::kQ6_K ? 512 : 256;
        const uint8_t* planes = steps - column % 32 / 4 * kStepBytes - kPlanes;
        const int step = column % 32 / 4 + s, odd = high_nibbles ? 128 : 0;
        add_plane(planes + odd, step, quad, 4, words);
        if constexpr (F == WeightFormat::kQ6_K) add_plane(planes + 256 + odd, step, quad, 5, words);
      }
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t byte = (words.w[r] >> (8 * j)) & 0xffu;
          float& value = out[4 * s + j][r];
          if constexpr (F == WeightFormat::kFP8) {
            value = scale[r] * e4m3_to_float(byte);
          } else if constexpr (F == WeightFormat::kQ8_0 || F == WeightFormat::kInt8) {
            value = scale[r] * float(int(byte) - 128);
          } else if constexpr (F == WeightFormat::kQ4_0) {
            value = scale[r] * float(int(byte) - 8);
          } else if constexpr (F == WeightFormat::kQ6_K) {
            value = scale[r] * float(int(byte) - 32);
          } else {
            value = fused(scale[r], float(byte), offset[r]);
          }
        }
      }
    }
  }
}

}  // namespace twofold::cuda
