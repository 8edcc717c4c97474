// GGUF's Q4_0: 32 columns, 4.5 bits a weight.
//
//   source  f16 scale; u8 q[16]: low nibbles are columns 0-15, high ones 16-31
//   panel   f16 scale[32]; 4 slices of nibbles (columns 0-15 | 16-31)
//   weight = scale * (q - 8)
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Q4_0 : Panel<32, OneScale<PerSubblock>, 4> {
  static constexpr const char *kName = "q4_0", *kGguf = "Q4_0";
  static constexpr int kBlockBytes = 18, kZero = 8;

  static void values(const uint8_t* block, int, uint8_t* u) { read_halves(block + 2, 16, u); }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 2; }
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
