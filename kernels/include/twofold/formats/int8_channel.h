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

  static const uint8_t* slices(const SourceBlock& source, int count, uint8_t* scratch) {
    if (count == 4) return source;
    std::memset(scratch, 0, kPanelColumns);
    std::memcpy(scratch, source, static_cast<size_t>(kBlockBytes * count));
    return scratch;
  }
  static bool put_scales(const SourceBlock& source, uint8_t* panel, int, int row) {
    return put_f16(source.row, panel, row);
  }
  static float source_scale(const SourceBlock& source, int, int) { return f16_at(source.row); }
  static void values(const uint8_t* block, int, uint8_t* u) { read_signed(block, u); }
  static void quantise_row(const float* x, const float* w, int64_t columns, uint8_t* row);
};

}  // namespace twofold::kernels::formats
