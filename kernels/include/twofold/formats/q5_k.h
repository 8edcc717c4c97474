// GGUF's Q5_K: 256 columns, 5.5 bits a weight.
//
//   source  f16 d; f16 dmin; u8 scales[12]; u8 high[32]; u8 q[128]
//   panel   as q4_k's, but before the nibbles of pair p two planes with bit 4 (four slices of both subblocks each)
//   weight = d * scale * q - dmin * min
#pragma once
#include "k_block.h"

namespace twofold::kernels::formats {

struct Q5_K : KBlock<5> {
  static constexpr const char *kName = "q5_k", *kGguf = "Q5_K";
  static constexpr int kDeviceDownThreads = 640;  // sm_120: registers of its down kernel for one token
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
