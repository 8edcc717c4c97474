// The formats a weight matrix may have, as files hold them (rows) and as the kernels read them (panels).
//
// A source row is one output's weights in a checkpoint: plain elements, or blocks such as GGUF's
// (ggml-common.h). A panel is 32 rows side by side, packed once at load and the same for every instruction
// set and for CUDA:
//
//   - Weights come in slices of 4 bytes per row, row after row: one slice is 128 consecutive bytes, which is two 512-bit
//     vectors of 16 rows, four of 8 rows, two columns of an AMX tile or one coalesced read of a warp. A slice holds 1
//     weight of a row (f32), 2 (f16, bf16), 4 (8-bit formats) or 8 (4-bit formats).
//   - K is cut into panel blocks; each begins with the scales of its 32 rows, then come its slices. So a panel is one
//     ascending stream, and every panel block begins on a cache line (f32, f16, bf16: every 128 bytes).
//   - 8-bit integers are stored with 128 added, so that every integer weight is unsigned: the product instructions take
//     unsigned weights and signed activations, and the offset adds a multiple of the sum of a block's
//     activations, which is known beforehand.
//   - The last panel's missing rows and the last block's missing columns are zero weights.
//
// A format's header (formats/) describes its blocks, little-endian; u8[a][b] is row-major; "nibbles
// (a | b)" are slices whose low nibbles belong to a and whose high nibbles to b; byte j of a row's slice s is
// weight 4s + j of its subblock. This header is plain C++ and is read by CUDA code too.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats/registry.h"

namespace twofold::kernels {

struct FormatLayout {
  const char* name;       // name in files, flags and messages
  int block_columns;      // columns of a source row's block
  int block_bytes;        // bytes of a source row's block
  int panel_columns;      // columns of a panel block
  int panel_block_bytes;  // bytes of a panel block, all 32 rows
  int scale_grid;         // one f32 scale apart from the rows for so many rows and columns; 0: none
  int row_head_bytes;     // before a source row's blocks: the scale of formats with one for a row or tensor
  const char* gguf;       // its type in GGUF; empty: none
  bool quantised;         // quantise_row() makes it
  int separate_bytes;     // bytes of a source row's block whose scale lies apart; 0: scales are in the rows
};

template <class Format>
inline constexpr bool is_quantised =
    is_per_channel<Format> || requires { Format::quantise(nullptr, nullptr, nullptr); };

template <class Format>
constexpr FormatLayout make_layout() {
  return {Format::kName,        Format::kBlockColumns, Format::kBlockBytes,   Format::kPanelColumns,
          Format::kPanelBytes,  Format::kScaleGrid,    Format::kRowHeadBytes, Format::kGguf,
          is_quantised<Format>, Format::kSeparateBytes};
}

inline constexpr FormatLayout kFormatLayouts[kNumWeightFormats] = {
#define TWOFOLD_FORMAT(name) make_layout<formats::name>(),
    TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT
};

constexpr const FormatLayout& layout_of(WeightFormat format) {
  return kFormatLayouts[static_cast<int>(format)];
}

// Whether rows can have this many columns: whole blocks, and no more than an integer sum holds.
constexpr bool columns_fit(WeightFormat format, int64_t columns) {
  const FormatLayout& layout = layout_of(format);
  return columns % layout.block_columns == 0 &&
         (layout.row_head_bytes == 0 || columns <= kMostChannelColumns);
}

// Bytes of a source row of `columns` weights; columns must be a multiple of block_columns.
constexpr int64_t source_row_bytes(WeightFormat format, int64_t columns) {
  const FormatLayout& layout = layout_of(format);
  return layout.row_head_bytes + columns / layout.block_columns * layout.block_bytes;
}

// Bytes of one panel: 32 rows of `columns` weights, columns rounded up to whole panel blocks.
constexpr int64_t panel_bytes(WeightFormat format, int64_t columns) {
  const FormatLayout& layout = layout_of(format);
  return (columns + layout.panel_columns - 1) / layout.panel_columns * layout.panel_block_bytes;
}

constexpr int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

constexpr int64_t packed_bytes(WeightFormat format, int64_t rows, int64_t columns) {
  return num_panels(rows) * panel_bytes(format, columns);
}

// Packs one panel. rows[0 .. num_rows) point to source rows, num_rows <= 32. With a scale grid: scales[r]
// points to the row's f32 scales, one for every scale_grid columns; of blocks whose scales lie apart
// (separate_bytes), to the row's bytes, one for every block; else scales is null. `panel` is 64-byte aligned and
// is written whole. False: a weight is a NaN or an infinity, or a scale is.
bool pack_panel(WeightFormat format, const void* const* rows, const void* const* scales, int num_rows,
                int64_t columns, void* panel);

// One source row as float32, exactly (scales as above): the reference of everything and what an embedding lookup needs.
void dequantise_row(WeightFormat format, const void* row, const void* scales, int64_t columns, float* out);

// One row of a panel as float32, exactly. For tests: equals dequantise_row of the row that was packed.
void unpack_row(WeightFormat format, const void* panel, int row, int64_t columns, float* out);

// A source row from float32, of formats that can be written (FormatLayout::quantised); columns a multiple of
// block_columns. `importance` may be null: the weight of each column's error.
void quantise_row(WeightFormat format, const float* x, const float* importance, int64_t columns, void* row);

}  // namespace twofold::kernels
