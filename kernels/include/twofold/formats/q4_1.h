// GGUF's Q4_1: 32 columns, 5 bits a weight.
//
//   source  f16 scale; f16 min; u8 q[16]: low nibbles are columns 0-15, high ones 16-31
//   panel   f16 scale[32]; f16 min[32]; 4 slices of nibbles (columns 0-15 | 16-31)
//   weight = scale * q + min
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Q4_1 : Panel<32, ScaleAndMin<PerSubblock>, 4> {
  static constexpr const char *kName = "q4_1", *kGguf = "Q4_1";
  static constexpr int kBlockBytes = 20, kZero = 0;

  static void values(const uint8_t* block, int, uint8_t* u) { read_halves(block + 4, 16, u); }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 4; }
};

}  // namespace twofold::kernels::formats
