// GGUF's Q4_K: 256 columns, 4.5 bits a weight.
//
//   source  f16 d; f16 dmin; u8 scales[12]; u8 q[128]
//   panel   f16 d[32]; f16 dmin[32]; u8 scale[8][32]; u8 min[8][32]; for each pair p of subblocks of 32 columns: 8 slices of
//           nibbles (subblock 2p | subblock 2p + 1)
//   weight = d * scale * q - dmin * min
#pragma once
#include "k_block.h"

namespace twofold::kernels::formats {

struct Q4_K : KBlock<4> {
  static constexpr const char *kName = "q4_k", *kGguf = "Q4_K";
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
