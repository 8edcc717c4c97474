// int4, ours: 64 columns, 4.5 bits a weight.
//
//   source  f16 scale; f16 min; u8 q[32], low nibble first
//   panel   f16 scale[32]; f16 min[32]; 8 slices of nibbles (columns 0-31 | 32-63)
//   weight = scale * q + min
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Int4 : Panel<64, ScaleAndMin<PerBlock>, 4> {
  static constexpr const char *kName = "int4", *kGguf = "";
  static constexpr int kBlockBytes = 36, kZero = 0;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    const uint8_t* q = block + 4 + 16 * subblock;
    for (int i = 0; i < 16; ++i) {
      u[2 * i] = q[i] & 0xfu;
      u[2 * i + 1] = q[i] >> 4;
    }
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t* scratch) {
    const uint8_t* q = block + 4;
    for (int i = 0; i < 16; ++i) {
      scratch[2 * i] = static_cast<uint8_t>((q[i] & 0xfu) | q[16 + i] << 4);
      scratch[2 * i + 1] = static_cast<uint8_t>(q[i] >> 4 | (q[16 + i] & 0xf0u));
    }
    return scratch;
  }
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
