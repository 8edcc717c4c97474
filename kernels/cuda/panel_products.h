// Products of a few rows of a panel (weight_format.h) with encoded activations, as one lane does them.
//
// A lane multiplies whole units and keeps one sum per token and row. Activations are rows as packed_kernels.h
// encodes them: f32 for f32 and f16 weights, bf16 for bf16 and fp8, q8 for integer weights; so an integer
// weight's products are exact sums as on the CPU.
#pragma once
#include <cstdint>

#include "panel_reading.h"

namespace twofold::cuda {

// acc[t][r] += products of unit `unit` of row 4 quad + r with token t, for t < count.
// x: encoded rows, row_bytes apart. P: activation_columns(K).
template <WeightFormat F, int kTokens>
struct UnitProduct {
  using Sums = float[kTokens][kRowsOfLane];

  TWOFOLD_HD static void add(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                             int64_t row_bytes, int count, Sums& acc) {
    if constexpr (is_plain(F)) {
      add_plain(panel, unit, quad, K, x, row_bytes, count, acc);
    } else if constexpr (F == WeightFormat::kFP8) {
      add_fp8(panel, unit, quad, x, row_bytes, count, acc);
    } else if constexpr (F == WeightFormat::kQ8_0) {
      const uint8_t* block = panel + int64_t(unit) * kBlockBytes;
      add_bytes(block, block + 64, unit * 32, quad, K, x, row_bytes, count, acc);
    } else if constexpr (F == WeightFormat::kInt8) {
      const uint8_t* block = panel + int64_t(unit / 4) * kBlockBytes;
      add_bytes(block, block + 64 + unit % 4 * 8 * kStepBytes, unit * 32, quad, K, x, row_bytes, count, acc);
    } else if constexpr (F == WeightFormat::kQ4_0) {
      add_q4_0(panel, unit, quad, K, x, row_bytes, count, acc);
    } else if constexpr (F == WeightFormat::kInt4) {
      add_int4(panel, unit, quad, K, x, row_bytes, count, acc);
    } else {
      add_k(panel, unit, quad, K, x, row_bytes, count, acc);
    }
  }

 private:
  static constexpr int kBlockBytes = kernels::layout_of(F).panel_block_bytes;

  TWOFOLD_HD static void add_plain(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                                   int64_t row_bytes, int count, Sums& acc) {
    constexpr int kColumns = unit_columns(F) / kStepsOfUnit;  // of a step
    const int num_steps = (K + kColumns - 1) / kColumns;
    const int first = unit * kStepsOfUnit;
    Words words[kStepsOfUnit];
#pragma unroll
    for (int s = 0; s < kStepsOfUnit; ++s) {
      words[s] = first + s < num_steps ? load_words(panel + int64_t(first + s) * kStepBytes + 16 * quad)
                                       : Words{{0, 0, 0, 0}};
    }
#pragma unroll
    for (int s = 0; s < kStepsOfUnit; ++s) {
      const int column = (first + s) * kColumns;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        const uint8_t* row = x + t * row_bytes;
        if constexpr (F == WeightFormat::kF32) {
          const float value = load<float>(row + 4 * column);
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r)
            acc[t][r] = fused(float_of_bits(words[s].w[r]), value, acc[t][r]);
        } else if constexpr (F == WeightFormat::kBF16) {
          const uint32_t pair = load<uint32_t>(row + 2 * column);
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r) {
            acc[t][r] = fused(bf16_low(words[s].w[r]), bf16_low(pair), acc[t][r]);
            acc[t][r] = fused(bf16_high(words[s].w[r]), bf16_high(pair), acc[t][r]);
          }
        } else {
          const float low = load<float>(row + 4 * column), high = load<float>(row + 4 * column + 4);
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r) {
            acc[t][r] = fused(f16_to_float(words[s].w[r] & 0xffffu), low, acc[t][r]);
            acc[t][r] = fused(f16_to_float(words[s].w[r] >> 16), high, acc[t][r]);
          }
        }
      }
    }
  }

  TWOFOLD_HD static void add_fp8(const uint8_t* panel, int unit, int quad, const uint8_t* x,
                                 int64_t row_bytes, int count, Sums& acc) {
    const uint8_t* block = panel + int64_t(unit / 4) * kBlockBytes;
    const uint8_t* steps = block + 128 + unit % 4 * 8 * kStepBytes + 16 * quad;
    const Words scales = load_words(block + 16 * quad);
    Words steps_words[8];
    load_steps(steps, steps_words);
    Sums part = {};
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const Words words = steps_words[s];
      const int column = unit * 32 + 4 * s;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        const uint32_t first = load<uint32_t>(x + t * row_bytes + 2 * column);
        const uint32_t second = load<uint32_t>(x + t * row_bytes + 2 * column + 4);
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          const uint32_t w = words.w[r];
          float sum = fused(e4m3_to_float(w), bf16_low(first), part[t][r]);
          sum = fused(e4m3_to_float(w >> 8), bf16_high(first), sum);
          sum = fused(e4m3_to_float(w >> 16), bf16_low(second), sum);
          part[t][r] = fused(e4m3_to_float(w >> 24), bf16_high(second), sum);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) continue;
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r)
        acc[t][r] = fused(part[t][r], float_of_bits(scales.w[r]), acc[t][r]);
    }
  }

  // 32 columns of bytes with 128 added, one scale: q8_0's block, a quarter of int8's.
  TWOFOLD_HD static void add_bytes(const uint8_t* scale_row, const uint8_t* steps, int column, int quad,
                                   int K, const uint8_t* x, int64_t row_bytes, int count, Sums& acc) {
    float scales[kRowsOfLane];
    load_scales(scale_row, quad, scales);
    Words steps_words[8];
    load_steps(steps + 16 * quad, steps_words);
    int32_t dot[kTokens][kRowsOfLane] = {};
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const Words words = steps_words[s];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        const uint32_t q = row_of(x, row_bytes, t, K).word(column + 4 * s);
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) dot[t][r] = dot4(words.w[r] ^ 0x80808080u, q, dot[t][r]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) continue;
      const float scale = row_of(x, row_bytes, t, K).scale(column);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) acc[t][r] = fused(float(dot[t][r]), scales[r] * scale, acc[t][r]);
    }
  }

  TWOFOLD_HD static void add_q4_0(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                                  int64_t row_bytes, int count, Sums& acc) {
    const uint8_t* block = panel + int64_t(unit) * kBlockBytes;
    const int column = unit * 32;
    float scales[kRowsOfLane];
    load_scales(block, quad, scales);
    Words steps_words[4];
    load_steps(block + 64 + 16 * quad, steps_words);
    int32_t dot[kTokens][kRowsOfLane] = {};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const Words words = steps_words[s];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        const Q8Row row = row_of(x, row_bytes, t, K);
        const uint32_t low = row.word(column + 4 * s), high = row.word(column + 16 + 4 * s);
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          dot[t][r] = dot4(words.w[r] & 0x0f0f0f0fu, low, dot[t][r]);
          dot[t][r] = dot4((words.w[r] >> 4) & 0x0f0f0f0fu, high, dot[t][r]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) continue;
      const Q8Row row = row_of(x, row_bytes, t, K);
      const int32_t offset = 8 * row.sum32(column);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r)
        acc[t][r] = fused(float(dot[t][r] - offset), scales[r] * row.scale(column), acc[t][r]);
    }
  }

  TWOFOLD_HD static void add_int4(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                                  int64_t row_bytes, int count, Sums& acc) {
    const uint8_t* block = panel + int64_t(unit) * kBlockBytes;
    float scales[kRowsOfLane], mins[kRowsOfLane];
    load_scales(block, quad, scales);
    load_scales(block + 64, quad, mins);
    int32_t dot[2][kTokens][kRowsOfLane] = {};
    multiply_nibbles<false>(block + 128, nullptr, unit * 64, quad, K, x, row_bytes, count, dot);
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const int column = unit * 64 + 32 * run;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        const Q8Row row = row_of(x, row_bytes, t, K);
        const float scale = row.scale(column), sum = float(row.sum32(column)) * scale;
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          acc[t][r] = fused(float(dot[run][t][r]), scales[r] * scale, acc[t][r]);
          acc[t][r] = fused(mins[r], sum, acc[t][r]);
        }
      }
    }
  }

  // One step of two runs: columns column to column + 3 of the first, and 32 further on of the second.
  TWOFOLD_HD static void multiply_step(const Words& low, const Words& high, int column, int K,
                                       const uint8_t* x, int64_t row_bytes, int count,
                                       int32_t (&dot)[2][kTokens][kRowsOfLane]) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) continue;
      const Q8Row row = row_of(x, row_bytes, t, K);
      const uint32_t q0 = row.word(column), q1 = row.word(column + 32);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        dot[0][t][r] = dot4(low.w[r], q0, dot[0][t][r]);
        dot[1][t][r] = dot4(high.w[r], q1, dot[1][t][r]);
      }
    }
  }

  // Eight steps of nibbles: low ones are the run that begins at `column`, high ones the next. With kFifth,
  // `planes` holds bit 4 of the first and, 128 bytes on, of the second run.
  template <bool kFifth>
  TWOFOLD_HD static void multiply_nibbles(const uint8_t* steps, const uint8_t* planes, int column, int quad,
                                          int K, const uint8_t* x, int64_t row_bytes, int count,
                                          int32_t (&dot)[2][kTokens][kRowsOfLane]) {
    Words steps_words[8];
    load_steps(steps + 16 * quad, steps_words);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const Words words = steps_words[s];
      uint32_t bits0 = 0, bits1 = 0;
      if constexpr (kFifth) {
        bits0 = load<uint16_t>(planes + 16 * s + 2 * quad);
        bits1 = load<uint16_t>(planes + 128 + 16 * s + 2 * quad);
      }
      Words low, high;
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        low.w[r] = (words.w[r] & 0x0f0f0f0fu) | spread_bits(bits0 >> (4 * r), 4);
        high.w[r] = ((words.w[r] >> 4) & 0x0f0f0f0fu) | spread_bits(bits1 >> (4 * r), 4);
      }
      multiply_step(low, high, column + 4 * s, K, x, row_bytes, count, dot);
    }
  }

  TWOFOLD_HD static void add_k(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                               int64_t row_bytes, int count, Sums& acc) {
    const uint8_t* block = panel + int64_t(unit / 4) * kBlockBytes;
    const int pair = unit % 4;
    const int column = unit * 64;
    if constexpr (F == WeightFormat::kQ6_K) {
      add_q6_k(block, pair, column, quad, K, x, row_bytes, count, acc);
    } else {
      float d[kRowsOfLane], dmin[kRowsOfLane];
      load_scales(block, quad, d);
      load_scales(block + 64, quad, dmin);
      int32_t dot[2][kTokens][kRowsOfLane] = {};
      if constexpr (F == WeightFormat::kQ5_K) {
        const uint8_t* planes = block + 640 + pair * 1280;
        multiply_nibbles<true>(planes + 256, planes, column, quad, K, x, row_bytes, count, dot);
      } else {
        multiply_nibbles<false>(block + 640 + pair * 1024, nullptr, column, quad, K, x, row_bytes, count,
                                dot);
      }
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const uint32_t scales = load<uint32_t>(block + 128 + 32 * (2 * pair + run) + 4 * quad);
        const uint32_t mins = load<uint32_t>(block + 384 + 32 * (2 * pair + run) + 4 * quad);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if (t >= count) continue;
          const Q8Row row = row_of(x, row_bytes, t, K);
          const float scale = row.scale(column + 32 * run);
          const float sum = float(row.sum32(column + 32 * run)) * scale;
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r) {
            const float weight_scale = d[r] * float((scales >> (8 * r)) & 0xffu);
            const float weight_min = dmin[r] * float((mins >> (8 * r)) & 0xffu);
            acc[t][r] = fused(float(dot[run][t][r]), weight_scale * scale, acc[t][r]);
            acc[t][r] = fused(-weight_min, sum, acc[t][r]);
          }
        }
      }
    }
  }

  // One run after the other and each in two halves of 16 columns, which have scales of their own.
  TWOFOLD_HD static void add_q6_k(const uint8_t* block, int pair, int column, int quad, int K,
                                  const uint8_t* x, int64_t row_bytes, int count, Sums& acc) {
    const uint8_t* planes = block + 576 + pair * 1536;
    float d[kRowsOfLane];
    load_scales(block, quad, d);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int32_t dot[2][kTokens][kRowsOfLane] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = 4 * half + i;
        const Words words = load_words(planes + 512 + s * kStepBytes + 16 * quad);
        uint32_t bits[4];  // bit 4 of both runs, bit 5 of both runs
#pragma unroll
        for (int plane = 0; plane < 4; ++plane)
          bits[plane] = load<uint16_t>(planes + 128 * plane + 16 * s + 2 * quad);
        Words low, high;
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) {
          low.w[r] = (words.w[r] & 0x0f0f0f0fu) | spread_bits(bits[0] >> (4 * r), 4) |
                     spread_bits(bits[2] >> (4 * r), 5);
          high.w[r] = ((words.w[r] >> 4) & 0x0f0f0f0fu) | spread_bits(bits[1] >> (4 * r), 4) |
                      spread_bits(bits[3] >> (4 * r), 5);
        }
        multiply_step(low, high, column + 4 * s, K, x, row_bytes, count, dot);
      }
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const uint32_t scales = load<uint32_t>(block + 64 + 32 * (2 * (2 * pair + run) + half) + 4 * quad);
        const int first = column + 32 * run + 16 * half;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if (t >= count) continue;
          const Q8Row row = row_of(x, row_bytes, t, K);
          const int32_t offset = 32 * row.sum16(first);
#pragma unroll
          for (int r = 0; r < kRowsOfLane; ++r) {
            const float weight_scale = d[r] * float(int8_t(scales >> (8 * r)));
            acc[t][r] = fused(float(dot[run][t][r] - offset), weight_scale * row.scale(first), acc[t][r]);
          }
        }
      }
    }
  }

  TWOFOLD_HD static Q8Row row_of(const uint8_t* x, int64_t row_bytes, int t, int K) {
    return {x + t * row_bytes, int(kernels::activation_columns(K))};
  }
};

}  // namespace twofold::cuda
