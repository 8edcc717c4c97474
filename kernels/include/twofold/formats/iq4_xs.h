// GGUF's IQ4_XS: 256 columns, 4.25 bits a weight. IQ4_NL's curve; each subblock of 32 has a scale of 6 bits, times an f16.
//
//   source  f16 d; u16 high; u8 low[4]; u8 q[128]. Nibble r of low and bits 2r, 2r + 1 of high are subblock r's scale, 32 added;
//           a subblock has 16 bytes of q, low nibbles are columns 0-15, high ones 16-31
//   panel   f16 d[32]; i8 scale[8][32]; for each pair p of subblocks: 8 slices of nibbles (subblock 2p | subblock 2p + 1)
//   weight = d * scale * curve[q]
#pragma once
#include "iq4_nl.h"

namespace twofold::kernels::formats {

struct IQ4_XSNumbers {
  static constexpr int kScaleAt = 0;
  static int source_number(const uint8_t* block, int subblock) {
    const int low = block[4 + subblock / 2] >> subblock % 2 * 4 & 0xf;
    return (low | (load_as<uint16_t>(block + 2) >> 2 * subblock & 3) << 4) - 32;
  }
};

struct IQ4_XS : Panel<256, ScaledNumbers<IQ4_XSNumbers, SignedBytes, PerSubblock>, 4, Curve> {
  static constexpr const char *kName = "iq4_xs", *kGguf = "IQ4_XS";
  static constexpr int kBlockBytes = 136, kZero = 128;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    read_halves(block + 8 + 16 * subblock, 16, u);
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t* scratch) {
    for (int pair = 0; pair < 4; ++pair) {
      pair_nibbles(block + 8 + 32 * pair, block + 24 + 32 * pair, 16, scratch + 32 * pair);
    }
    return scratch;
  }
};

}  // namespace twofold::kernels::formats
