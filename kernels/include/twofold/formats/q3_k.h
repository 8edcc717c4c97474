// GGUF's Q3_K: 256 columns, 3.4375 bits a weight (in a panel 3.5625: its scales are whole bytes).
//
//   source  u8 high[32]; u8 low[64]; u8 scales[12]; f16 d. Bits 2r, 2r + 1 of low[32 h + i] belong to weight i of subblock 4h + r,
//           bit r of high[i] to weight i of subblock r. 16 scales of 6 bits: low nibbles of scales[0..7] are those of the first
//           eight, high ones those of the others; bits 2j, 2j + 1 of scales[8 + i] are the upper bits of scale 4j + i; 32 is added.
//   panel   f16 d[32]; i8 scale[16][32], each for a subblock of 16; for each four subblocks of 32 columns: four planes with bit 2 (two
//           slices of all four subblocks each), then 8 slices of four codes
//   weight = d * scale * (q - 4)
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Q3_KNumbers {
  static constexpr int kScaleAt = 108;
  static int source_number(const uint8_t* block, int half_subblock) {
    const uint8_t* packed = block + 96;
    const int low = packed[half_subblock % 8] >> (half_subblock / 8 * 4) & 0xf;
    return (low | (packed[8 + half_subblock % 4] >> (half_subblock / 4 * 2) & 3) << 4) - 32;
  }
};

struct Q3_K : Panel<256, ScaledNumbers<Q3_KNumbers, SignedBytes, PerHalf>, 3> {
  static constexpr const char *kName = "q3_k", *kGguf = "Q3_K";
  static constexpr int kBlockBytes = 110, kZero = 4;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    read_two_bits(block + 32 + subblock / 4 * 32, subblock % 4 * 2, u);
    for (int i = 0; i < kSubblockColumns; ++i)
      u[i] = static_cast<uint8_t>(u[i] | (block[i] >> subblock & 1u) << 2);
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 32; }
  static void upper(const uint8_t* block, int subblock, uint8_t* u) {
    for (int i = 0; i < kSubblockColumns; ++i) u[i] = block[i] >> subblock & 1u;
  }
};

}  // namespace twofold::kernels::formats
