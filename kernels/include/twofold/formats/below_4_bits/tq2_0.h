// GGUF's TQ2_0: ternary weights, 256 columns, 2.0625 bits a weight.
//
//   source  u8 q[64]; f16 d. Bits 2r, 2r + 1 of q[32 h + i] belong to weight i of subblock 4h + r
//   panel   f16 d[32]; for each four subblocks of 32 columns: 8 slices of four codes
//   weight = d * (q - 1)
#pragma once
#include "../scales.h"

namespace twofold::kernels::formats {

struct TQ2_0 : Panel<256, OneScale<PerSubblock, 64>, 2> {
  static constexpr const char *kName = "tq2_0", *kGguf = "TQ2_0";
  static constexpr int kBlockBytes = 66, kZero = 1;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    read_two_bits(block + subblock / 4 * 32, subblock % 4 * 2, u);
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block; }
};

}  // namespace twofold::kernels::formats
