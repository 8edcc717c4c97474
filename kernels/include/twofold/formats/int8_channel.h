// int8_channel, ours: one scale for a row, 8 bits a weight. Panels are int8's, which repeat the scale in every block.
//
//   source  f16 scale; then i8 q[32], block after block
//   weight = scale * q
#pragma once
#include "int8.h"

namespace twofold::kernels::formats {

struct Int8_Channel : Int8 {
  using InBlocks = Int8;  // the format whose kernels read the same panels with q8 activations
  static constexpr const char* kName = "int8_channel";
  static constexpr int kRowHeadBytes = 2, kBlockColumns = 32, kBlockBytes = 32;

  static void values(const uint8_t* block, int, uint8_t* u) { read_signed(block, u); }
  static void quantise_row(const float* x, const float* w, int64_t columns, uint8_t* row);
};

}  // namespace twofold::kernels::formats
