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

  static void values(const uint8_t* block, int, uint8_t* u) { read_halves(block, 16, u); }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block; }
  static bool put_scales(const SourceBlock& source, uint8_t* panel, int, int row) {
    return put_f16(source.row, panel, row);
  }
  static float source_scale(const SourceBlock& source, int, int) { return f16_at(source.row); }
  static void quantise_row(const float* x, const float* w, int64_t columns, uint8_t* row);
};

}  // namespace twofold::kernels::formats
