// The formats a weight matrix may have, as files hold them (rows) and as the kernels read them (panels).
//
// A source row is what a checkpoint holds of one output: plain elements, or GGUF's blocks. A panel is 32 rows
// side by side, packed once at load and the same for every instruction set and for CUDA:
//
//   - Weights come in steps of 4 bytes per row, row after row: one step is 128 consecutive bytes, which is
//     two 512-bit vectors of 16 rows, four of 8 rows, two columns of an AMX tile or one coalesced read of a
//     warp. A step holds 1 weight of a row (f32), 2 (f16, bf16), 4 (8-bit formats) or 8 (4-bit formats).
//   - K is cut into panel blocks; each begins with the scales of its 32 rows, then come its steps. So a panel
//     is one ascending stream, and every panel block begins on a cache line (f32, f16, bf16: every 128
//     bytes).
//   - 8-bit integers are stored with 128 added, so that every integer weight is unsigned: the product
//     instructions take unsigned weights and signed activations, and what the offset adds is a multiple of
//     the sum of a block's activations, which is known beforehand.
//   - The last panel's missing rows and the last block's missing columns are zero weights.
//
// Panel blocks (little-endian; u8[a][b] is row-major; "nibbles p" are steps whose low nibbles belong to the
// first and whose high nibbles to the second of two runs of weights; byte j of a row's step s is weight 4s +
// j of its run; bit 4r + j of a plane's step s is the bit of row r's weight 4s + j, 16 bytes a step):
//
//   f32        1 column : f32[32]
//   f16, bf16  2 columns: u16[32][2]
//   fp8      128 columns: f32 scale[32]; 32 steps of e4m3 bytes
//   q8_0      32 columns: f16 scale[32]; 8 steps of (q + 128)
//   q4_0      32 columns: f16 scale[32]; 4 steps of nibbles (columns 0-15 | 16-31); value = scale * (q - 8)
//   q4_k     256 columns: f16 d[32]; f16 dmin[32]; u8 scale[8][32]; u8 min[8][32]; for each pair p of runs of
//                         32 columns: 8 steps of nibbles (run 2p | run 2p + 1);
//                         value = d * scale * q - dmin * min
//   q5_k     256 columns: as q4_k, but before the nibbles of pair p two planes (8 steps each) with bit 4 of
//                         run 2p and of run 2p + 1
//   q6_k     256 columns: f16 d[32]; i8 scale[16][32] (of runs of 16); for each pair p of runs of 32 columns:
//                         planes bit 4 of run 2p, bit 4 of run 2p + 1, bit 5 of run 2p, bit 5 of run 2p + 1,
//                         then 8 steps of nibbles; value = d * scale * (q - 32)
//   int8     128 columns: f16 scale[32]; 32 steps of (q + 128); value = scale * q
//   int4      64 columns: f16 scale[32]; f16 min[32]; 8 steps of nibbles (columns 0-31 | 32-63);
//                         value = scale * q + min
//
// Source rows: f32, f16, bf16 are plain; fp8 is plain e4m3 bytes with a separate grid of f32 scales, one for
// 128 x 128 weights; q*_* are GGUF's blocks (ggml-common.h); int8 and int4 are ours: blocks of
// {f16 scale; i8 q[128]} and {f16 scale; f16 min; u8 q[32]} (64 columns, low nibbles first).
//
// This header is plain C++ and is read by CUDA code too.
#pragma once
#include <cstddef>
#include <cstdint>

namespace twofold::kernels {

enum class WeightFormat : uint8_t {
  kF32,
  kF16,
  kBF16,
  kFP8,
  kQ8_0,
  kQ4_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kInt8,
  kInt4
};
inline constexpr int kNumWeightFormats = 11;
inline constexpr int kPanelRows = 32;

struct FormatLayout {
  const char* name;       // what files, flags and messages call it
  int block_columns;      // columns of a source row's block
  int block_bytes;        // bytes of a source row's block
  int panel_columns;      // columns of a panel block
  int panel_block_bytes;  // bytes of a panel block, all 32 rows
};

inline constexpr FormatLayout kFormatLayouts[kNumWeightFormats] = {
    {"f32", 1, 4, 1, 128},         {"f16", 1, 2, 2, 128},         {"bf16", 1, 2, 2, 128},
    {"fp8", 1, 1, 128, 4224},      {"q8_0", 32, 34, 32, 1088},    {"q4_0", 32, 18, 32, 576},
    {"q4_k", 256, 144, 256, 4736}, {"q5_k", 256, 176, 256, 5760}, {"q6_k", 256, 210, 256, 6720},
    {"int8", 128, 130, 128, 4160}, {"int4", 64, 36, 64, 1152},
};

constexpr const FormatLayout& layout_of(WeightFormat format) {
  return kFormatLayouts[static_cast<int>(format)];
}

// Bytes of a source row of `columns` weights; columns must be a multiple of block_columns.
constexpr int64_t source_row_bytes(WeightFormat format, int64_t columns) {
  return columns / layout_of(format).block_columns * layout_of(format).block_bytes;
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

// Packs one panel. rows[0 .. num_rows) point to source rows, num_rows <= 32. fp8: scales[r] points to the
// row's scales, one for every 128 columns; other formats: scales is null. `panel` is 64-byte aligned and is
// written whole.
void pack_panel(WeightFormat format, const void* const* rows, const float* const* scales, int num_rows,
                int64_t columns, void* panel);

// One source row as float32, exactly: the reference of everything and what an embedding lookup needs.
void dequantise_row(WeightFormat format, const void* row, const float* scales, int64_t columns, float* out);

// One row of a panel as float32, exactly. For tests: equals dequantise_row of the row that was packed.
void unpack_row(WeightFormat format, const void* panel, int row, int64_t columns, float* out);

// A source row from float32 (all formats but fp8); columns a multiple of block_columns. `importance` may be
// null: the weight of each column's error.
void quantise_row(WeightFormat format, const float* x, const float* importance, int64_t columns, void* row);

}  // namespace twofold::kernels
