// What GGUF's IQ2_XXS, IQ2_XS and IQ2_S share: 256 columns; a grid has the magnitudes of 8 weights, each 8, 25 or 43. In a
// panel a weight is a code of 3 bits, looked up in a table, because products read codes and no places of a grid.
//
//   weight = d / 8 * (2 * scale + 1) * magnitude; a code is a magnitude's index and, as bit 2, the sign
#pragma once
#include "../scales.h"

namespace twofold::kernels::formats {

// 8, 25, 43 and their negatives, and 128 added.
struct IQ2Magnitudes {
  static constexpr uint8_t kTable[16] = {136, 153, 171, 128, 120, 103, 85,  128,
                                         128, 128, 128, 128, 128, 128, 128, 128};
  static constexpr int kDotBits = 8;
};

// values() and upper() of a format that has, of a subblock's weights 8i ... 8i + 7, grid(block, subblock, i), an index of a magnitude in
// every 2 bits, and signs(block, subblock, i).
template <class Format>
struct IQ2Codes {
  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    for (int i = 0; i < 4; ++i) {
      const uint64_t signs = spread_bits(Format::signs(block, subblock, i));
      store_as(u + 8 * i, spread_pairs(Format::grid(block, subblock, i)) | signs << 2);
    }
  }
  static void upper(const uint8_t* block, int subblock, uint8_t* u) {
    for (int i = 0; i < 4; ++i) store_as(u + 8 * i, spread_bits(Format::signs(block, subblock, i)));
  }
};

// IQ2_XS and IQ2_S: every 16 columns have a scale of 4 bits, the lower ones of a byte first. kAt: the first byte.
template <int kAt>
struct IQ2Numbers {
  static constexpr int kScaleAt = 0;
  static constexpr float kFactor = 0.125f;
  static int source_number(const uint8_t* block, int half_subblock) {
    return 2 * (block[kAt + half_subblock / 2] >> half_subblock % 2 * 4 & 0xf) + 1;
  }
};

}  // namespace twofold::kernels::formats
