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
  using Format = FormatOf<F>;
  using Sums = float[kTokens][kRowsOfLane];
  // Whether integer sums are of 16 columns: those have scales of their own, or a lane has only one half of its subblocks.
  static constexpr bool kHalves = [] {
    if constexpr (kernels::is_integer<Format>) return Format::Kind::kSums > 1 || unit_parts<Format>() == 2;
    return false;
  }();

  TWOFOLD_HD static void add(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                             int64_t row_bytes, int count, Sums& acc) {
    if constexpr (kernels::is_integer<Format>) {
      constexpr int kParts = unit_parts<Format>();
      const int whole = unit / kParts;
      const uint8_t* block = panel + int64_t(whole / Format::kUnits) * Format::kPanelBytes;
      add_integers(block, whole % Format::kUnits, unit % kParts, whole * Format::kUnitColumns, quad, K, x,
                   row_bytes, count, acc);
    } else if constexpr (kIsPlain<Format>) {
      add_plain(panel, unit, quad, K, x, row_bytes, count, acc);
    } else {
      add_scaled(panel, unit, quad, x, row_bytes, count, acc);
    }
  }

 private:
  // Products of one slice with a token's columns from `column` on.
  TWOFOLD_HD static void multiply_slice(const Words& words, const uint8_t* row, int column,
                                        float (&acc)[kRowsOfLane]) {
    constexpr int kColumns = Format::kSliceColumns;
    float values[kColumns];
    if constexpr (activation_of(F) == ActivationKind::kF32) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) values[c] = load_as<float>(row + 4 * (column + c));
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        const uint32_t pair = load_as<uint32_t>(row + 2 * (column + c));
        values[c] = bf16_low(pair);
        values[c + 1] = bf16_high(pair);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsOfLane; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) acc[r] = fused(weight_of<Format>(words.w[r], c), values[c], acc[r]);
    }
  }

  TWOFOLD_HD static void add_plain(const uint8_t* panel, int unit, int quad, int K, const uint8_t* x,
                                   int64_t row_bytes, int count, Sums& acc) {
    const int num_steps = (K + Format::kSliceColumns - 1) / Format::kSliceColumns;
    const int first = unit * kSlicesOfUnit;
    Words words[kSlicesOfUnit];
#pragma unroll
    for (int s = 0; s < kSlicesOfUnit; ++s) {
      words[s] = first + s < num_steps ? load_words(panel + int64_t(first + s) * kSliceBytes + 16 * quad)
                                       : Words{{0, 0, 0, 0}};
    }
#pragma unroll
    for (int s = 0; s < kSlicesOfUnit; ++s) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        multiply_slice(words[s], x + t * row_bytes, (first + s) * Format::kSliceColumns, acc[t]);
      }
    }
  }

  // Bytes whose panel block has an f32 for each row.
  TWOFOLD_HD static void add_scaled(const uint8_t* panel, int unit, int quad, const uint8_t* x,
                                    int64_t row_bytes, int count, Sums& acc) {
    const uint8_t* block = panel + int64_t(unit / Format::kUnits) * Format::kPanelBytes;
    const Words scales = load_words(block + 16 * quad);
    Words words[Format::kUnitSlices];
    load_slices(block + Format::slices_at(unit % Format::kUnits) + 16 * quad, words);
    Sums part = {};
#pragma unroll
    for (int s = 0; s < Format::kUnitSlices; ++s) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= count) continue;
        multiply_slice(words[s], x + t * row_bytes, unit * Format::kUnitColumns + 4 * s, part[t]);
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

  // A unit's integer sums, then its scales: of the whole unit at once or, where 16 columns have scales of
  // their own, of the first and then the last half of its subblocks; where a lane has only one of them, of two of four subblocks and
  // then of the others.
  TWOFOLD_HD static void add_integers(const uint8_t* block, int unit, int part, int column, int quad, int K,
                                      const uint8_t* x, int64_t row_bytes, int count, Sums& acc) {
    constexpr bool kOneHalf = unit_parts<Format>() == 2;
    constexpr int kSubblocks = Format::kUnitSubblocks < 2 ? 1 : 2;  // whose sums are registers
    constexpr int kSlices = Format::kUnitSlices / (kHalves ? 2 : 1);
#pragma unroll
    for (int turn = 0; turn < (kHalves && !kOneHalf ? 2 : 1); ++turn) {
      const int half = kOneHalf ? part : turn;
      Words words[kSlices];
      load_slices(block + Format::slices_at(unit) + half * kSlices * kSliceBytes + 16 * quad, words);
      const uint8_t* planes =
          block + Format::planes_at(unit) + (kOneHalf ? part * (Format::kUnitPlaneBytes / 2) : 0);
#pragma unroll
      for (int first_subblock = 0; first_subblock < Format::kUnitSubblocks; first_subblock += kSubblocks) {
        int32_t dot[kSubblocks][kTokens][kRowsOfLane] = {};
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          multiply_slice(words[s], planes, first_subblock, (kOneHalf ? 0 : half * kSlices) + s,
                         column + 32 * first_subblock + (kOneHalf ? 16 * part : 0), quad, K, x, row_bytes,
                         count, dot);
        }
#pragma unroll
        for (int subblock = 0; subblock < kSubblocks; ++subblock) {
          add_run(block, unit * Format::kUnitSubblocks + first_subblock + subblock, half,
                  column + 32 * (first_subblock + subblock) + 16 * half, quad, K, x, row_bytes, count,
                  dot[subblock], acc);
        }
      }
    }
  }

  // What a subblock's integer sums, or a half's, add; `first` is its first column.
  TWOFOLD_HD static void add_run(const uint8_t* block, int subblock, int half, int first, int quad, int K,
                                 const uint8_t* x, int64_t row_bytes, int count,
                                 const int32_t (&dot)[kTokens][kRowsOfLane], Sums& acc) {
    const Lane::F scale = Format::template scale<Lane>(block, subblock, half, quad);
    const Lane::F min = Format::template min<Lane>(block, subblock, half, quad);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) continue;
      const Q8Row row = row_of(x, row_bytes, t, K);
      const float x_scale = row.scale(first);
      int32_t offset = 0;  // what made weights unsigned; bytes are signed again already
      if constexpr (Format::kCodes > 1 && Format::kZero != 0 && !kernels::has_table<Format>) {
        offset = Format::kZero * (kHalves ? row.sum16(first) : row.sum32(first));
      }
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        acc[t][r] = fused(float(dot[t][r] - offset), scale.v[r] * x_scale, acc[t][r]);
      }
      if constexpr (Format::kMin) {
        const float sum = float(kHalves ? row.sum16(first) : row.sum32(first)) * x_scale;
#pragma unroll
        for (int r = 0; r < kRowsOfLane; ++r) acc[t][r] = fused(min.v[r], sum, acc[t][r]);
      }
    }
  }

  // One slice of two subblocks of a unit. Of nibbles: low ones are columns of the unit's first half, high ones of its second.
  template <class Dots>
  TWOFOLD_HD static void multiply_slice(const Words& words, const uint8_t* planes, int first_subblock,
                                        int slice, int column, int quad, int K, const uint8_t* x,
                                        int64_t row_bytes, int count, Dots& dot) {
    constexpr int kSecond = Format::kUnitSubblocks < 2 ? 0 : 1;  // place of the second subblock
    Words low, high;
    if constexpr (kernels::has_table<Format> && Format::kNibbles) {
      Lane::look_up_signed<Format>(words, low, high);
    } else if constexpr (Format::kCodes == 4) {
      low = Format::template with_planes<Lane>(Lane::two_bits(words, 2 * first_subblock), planes,
                                               first_subblock, slice, quad);
      high = Format::template with_planes<Lane>(Lane::two_bits(words, 2 * first_subblock + 2), planes,
                                                first_subblock + 1, slice, quad);
      if constexpr (kernels::has_table<Format>) {
        low = Lane::look_up<Format, Format::kZero>(low);
        high = Lane::look_up<Format, Format::kZero>(high);
      }
    } else if constexpr (Format::kNibbles) {
      low = Format::template with_planes<Lane>(Lane::low_nibbles(words), planes, 0, slice, quad);
      high = Format::template with_planes<Lane>(Lane::high_nibbles(words), planes, kSecond,
                                                kSecond == 1 ? slice : slice + 4, quad);
    } else {
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) low.w[r] = words.w[r] ^ 0x80808080u;
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= count) continue;
      const Q8Row row = row_of(x, row_bytes, t, K);
      const uint32_t q0 = row.word(column + 4 * slice);
      uint32_t q1 = 0;
      if constexpr (Format::kCodes > 1) q1 = row.word(column + (kSecond == 1 ? 32 : 16) + 4 * slice);
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        dot[0][t][r] = dot4(low.w[r], q0, dot[0][t][r]);
        if constexpr (Format::kCodes > 1) dot[kSecond][t][r] = dot4(high.w[r], q1, dot[kSecond][t][r]);
      }
    }
  }

  TWOFOLD_HD static Q8Row row_of(const uint8_t* x, int64_t row_bytes, int t, int K) {
    return {x + t * row_bytes, int(kernels::activation_columns(K))};
  }
};

}  // namespace twofold::cuda
