// GGUF's IQ1_M: 256 columns, 1.75 bits a weight; in a panel 3.5625, because each 8 weights have a shift of their own: a weight
// is one of six numbers, looked up in a table.
//
//   source  u8 low[32]; u8 high[16]; u16 scales[4]. Nibble j % 2 of high[j / 2] has 3 more bits of the place of the grid of
//           weights 8j ... 8j + 7, then whether their shift is negative. Bits 3i ... 3i + 2 of scales[k] are the scale of the
//           16 columns 4k + i; the four upper nibbles are d's bits, lowest first
//   panel   f16 d[32]; u8 (2 * scale + 1)[16][32]; for each four subblocks: four planes with bit 2, then 8 slices of four codes
//   weight = d / 8 * (2 * scale + 1) * (8 * q + 1 or 8 * q - 1); a code is q + 1 and, as bit 2, that the shift is negative
#pragma once
#include "iq1_s.h"

namespace twofold::kernels::formats {

// -7, 1, 9 and -9, -1, 7, and 16 added. kDotBits: 8 products of at most 9 * 127 fit 16 bits.
struct IQ1_MShifted {
  static constexpr uint8_t kTable[16] = {9, 17, 25, 16, 7, 15, 23, 16, 16, 16, 16, 16, 16, 16, 16, 16};
  static constexpr int kDotBits = 5;
};

struct IQ1_MNumbers {
  static constexpr int kScaleNibblesAt = 49;  // the upper ones of this byte and of each second after it
  static constexpr float kFactor = 0.125f;
  static void get_scale(const uint8_t* block, uint8_t* f16) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(block[kScaleNibblesAt + 2 * i] >> 4) << 4 * i;
    store_as(f16, static_cast<uint16_t>(bits));
  }
  static int source_number(const uint8_t* block, int half_subblock) {
    return 2 * (load_as<uint16_t>(block + 48 + half_subblock / 4 * 2) >> half_subblock % 4 * 3 & 7) + 1;
  }
};

struct IQ1_M : Panel<256, ScaledNumbers<IQ1_MNumbers, UnsignedBytes, PerHalf>, 3, IQ1_MShifted> {
  static constexpr const char *kName = "iq1_m", *kGguf = "IQ1_M";
  static constexpr int kBlockBytes = 56, kZero = 16;

  static uint32_t high(const uint8_t* block, int subblock, int i) {
    return static_cast<uint32_t>(block[32 + 2 * subblock + i / 2] >> i % 2 * 4 & 0xf);
  }
  static uint64_t negative(const uint8_t* block, int subblock, int i) {
    return (high(block, subblock, i) >> 3) * 0x0101010101010101u;
  }
  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t place = block[4 * subblock + i] | (high(block, subblock, i) & 7u) << 8;
      store_as(u + 8 * i, spread_pairs(IQ1Grid::kGrid[place]) | negative(block, subblock, i) << 2);
    }
  }
  static void upper(const uint8_t* block, int subblock, uint8_t* u) {
    for (int i = 0; i < 4; ++i) store_as(u + 8 * i, negative(block, subblock, i));
  }
};

}  // namespace twofold::kernels::formats
