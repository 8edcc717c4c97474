// int8, ours: 128 columns, 8.125 bits a weight.
//
//   source  f16 scale; i8 q[128]
//   panel   f16 scale[32]; 32 slices of (q + 128)
//   weight = scale * q
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Int8 : Panel<128, OneScale<PerBlock>, 8> {
  static constexpr const char *kName = "int8", *kGguf = "";
  static constexpr int kBlockBytes = 130, kZero = 128;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    read_signed(block + 2 + kSubblockColumns * subblock, u);
  }
  static constexpr uint8_t kFlip = 0x80;
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 2; }
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
