// GGUF's Q8_0: 32 columns, 8.5 bits a weight.
//
//   source  f16 scale; i8 q[32]
//   panel   f16 scale[32]; 8 slices of (q + 128)
//   weight = scale * q
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Q8_0 : Panel<32, OneScale<PerSubblock>, 8> {
  static constexpr const char *kName = "q8_0", *kGguf = "Q8_0";
  static constexpr int kBlockBytes = 34, kZero = 128;

  static void values(const uint8_t* block, int, uint8_t* u) { read_signed(block + 2, u); }
  static constexpr uint8_t kFlip = 0x80;
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 2; }
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
