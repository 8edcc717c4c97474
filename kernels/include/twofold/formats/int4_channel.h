// int4_channel, ours: one scale for a row, 4 bits a weight. Panels are q4_0's, which repeat the scale in every block.
//
//   source  f16 scale; then u8 q[16] for 32 columns, block after block: low nibbles are columns 0-15, high ones 16-31
//   weight = scale * (q - 8)
#pragma once
#include "q4_0.h"

namespace twofold::kernels::formats {

struct Int4_Channel : Q4_0 {
  using InBlocks = Q4_0;
  static constexpr const char *kName = "int4_channel", *kGguf = "";
  static constexpr int kRowHeadBytes = 2, kBlockBytes = 16;

  static void values(const uint8_t* block, int, uint8_t* u) {
    read_nibbles(block, 0, 16, u);
    read_nibbles(block, 4, 16, u + 16);
  }
  static void quantise_row(const float* x, const float* w, int64_t columns, uint8_t* row);
};

}  // namespace twofold::kernels::formats
