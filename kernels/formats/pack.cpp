// Source rows into panels: a transposition of 4-byte words, as fast as rows come from a disk.
#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

using Four = uint32_t __attribute__((vector_size(16)));

// Whether no element has all bits of `exponent` set, which only infinities and NaNs have (of e4m3 the NaN). num_bytes
// is a multiple of 64.
template <class Word>
bool all_finite(Word exponent, const uint8_t* bytes, int64_t num_bytes) {
  typedef Word Words __attribute__((vector_size(16)));
  const Words mask = Words{} + exponent;
  Four found{};
  for (int64_t i = 0; i < num_bytes; i += 64) {
    for (int v = 0; v < 64; v += 16) {
      found |= __builtin_bit_cast(Four, (load_as<Words>(bytes + i + v) & mask) == mask);
    }
  }
  return (found[0] | found[1] | found[2] | found[3]) == 0;
}
constexpr uint16_t kF16Exponent = 0x7c00;
constexpr uint32_t kF32Exponent = 0x7f800000;

constexpr int kChunkSlices = 64;  // taken from four rows at once: 8 KiB of a panel

// What the rows that a panel misses are read from: zero weights once xored with Flip.
template <uint8_t Flip>
struct Missing {
  uint8_t bytes[4 * kChunkSlices];
  constexpr Missing() : bytes() {
    for (uint8_t& byte : bytes) byte = Flip;
  }
};
template <uint8_t Flip>
alignas(16) constexpr Missing<Flip> kMissing;

// `slices` slices (at most kChunkSlices) of 32 rows into a panel, each byte xored with Flip.
template <uint8_t Flip = 0>
void put_slices(const uint8_t* const* rows, int slices, uint8_t* to) {
  const uint32_t flip = 0x01010101u * Flip;
  for (int r = 0; r < kPanelRows; r += 4) {
    const uint8_t *a = rows[r], *b = rows[r + 1], *c = rows[r + 2], *d = rows[r + 3];
    uint8_t* out = to + 4 * r;
    int s = 0;
    for (; s + 4 <= slices; s += 4, out += 4 * kSliceBytes) {
      const Four va = load_as<Four>(a + 4 * s) ^ flip, vb = load_as<Four>(b + 4 * s) ^ flip;
      const Four vc = load_as<Four>(c + 4 * s) ^ flip, vd = load_as<Four>(d + 4 * s) ^ flip;
      const Four ab = __builtin_shufflevector(va, vb, 0, 4, 1, 5),
                 cd = __builtin_shufflevector(vc, vd, 0, 4, 1, 5);
      const Four ef = __builtin_shufflevector(va, vb, 2, 6, 3, 7),
                 gh = __builtin_shufflevector(vc, vd, 2, 6, 3, 7);
      store_as(out, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
      store_as(out + kSliceBytes, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
      store_as(out + 2 * kSliceBytes, __builtin_shufflevector(ef, gh, 0, 1, 4, 5));
      store_as(out + 3 * kSliceBytes, __builtin_shufflevector(ef, gh, 2, 3, 6, 7));
    }
    for (; s < slices; ++s, out += kSliceBytes) {
      for (int i = 0; i < 4; ++i) store_as(out + 4 * i, load_as<uint32_t>(rows[r + i] + 4 * s) ^ flip);
    }
  }
}

// Writes rows of plain bytes: 4 bytes per slice, zeros after the last. Returns whether all elements are finite.
template <class Word>
bool put_bytes(Word exponent, const uint8_t* const* rows, int num_rows, int64_t first, int64_t num_bytes,
               uint8_t* to) {
  const uint8_t* at[kPanelRows];
  bool finite = true;
  int64_t byte = 0;
  for (; byte + 4 <= num_bytes; byte += 4 * kChunkSlices) {
    const int64_t slices = (num_bytes - byte) / 4;
    const int here = static_cast<int>(slices < kChunkSlices ? slices : kChunkSlices);
    for (int r = 0; r < kPanelRows; ++r) at[r] = r < num_rows ? rows[r] + first + byte : kMissing<0>.bytes;
    put_slices(at, here, to + byte / 4 * kSliceBytes);
    finite &= all_finite(exponent, to + byte / 4 * kSliceBytes, here * kSliceBytes);
  }
  const int64_t rest = num_bytes % 4;
  if (rest == 0) return finite;
  uint8_t* last = to + num_bytes / 4 * kSliceBytes;
  std::memset(last, 0, kSliceBytes);
  for (int r = 0; r < num_rows; ++r) {
    std::memcpy(last + 4 * r, rows[r] + first + num_bytes - rest, static_cast<size_t>(rest));
  }
  return finite & all_finite(exponent, last, kSliceBytes);
}

// A block after the other: the grid's scales of its rows, then their bytes.
template <class Format>
bool pack_scaled_bytes(const uint8_t* const* rows, const void* const* scales, int num_rows, int64_t columns,
                       uint8_t* panel) {
  constexpr int64_t kColumns = Format::kPanelColumns;
  bool finite = true;
  for (int64_t b = 0; b * kColumns < columns; ++b, panel += Format::kPanelBytes) {
    const int64_t rest = columns - b * kColumns < kColumns ? columns - b * kColumns : kColumns;
    if (rest < kColumns) std::memset(panel, 0, Format::kPanelBytes);
    for (int r = 0; r < kPanelRows; ++r)
      store_as(panel + 4 * r, r < num_rows ? static_cast<const float*>(scales[r])[b] : 0.0f);
    finite &= all_finite(kF32Exponent, panel, Format::kHeaderBytes);
    finite &= put_bytes(Format::kExponent, rows, num_rows, b * kColumns, rest, panel + Format::kHeaderBytes);
  }
  return finite;
}

// Block i of those that belong to a panel block.
template <class Format>
SourceBlock block_at(SourceBlock first, int i) {
  const bool is_separate = Format::kSeparateBytes > 0 && first.separate != nullptr;
  first.block += i * (is_separate ? Format::kSeparateBytes : Format::kBlockBytes);
  if (is_separate) first.separate += i;
  return first;
}

// A row's slices of a panel block, unit after unit; in place, or in scratch.
template <class Format>
const uint8_t* steps_of(const SourceBlock& source, uint8_t* scratch) {
  if constexpr (requires { Format::slices(source, source.count, scratch); }) {
    return Format::slices(source, source.count, scratch);
  } else {
    constexpr int kBlockSubblocks = Format::kBlockColumns / kSubblockColumns, kBits = Format::kCodeBits;
    constexpr int kBytes = Format::kUnitColumns / Format::kCodes;  // bytes of a unit
    uint8_t u[Format::kPanelColumns] = {};
    for (int subblock = 0; subblock < source.count * kBlockSubblocks; ++subblock)
      Format::values(block_at<Format>(source, subblock / kBlockSubblocks), subblock % kBlockSubblocks,
                     u + kSubblockColumns * subblock);
    for (int unit = 0; unit < Format::kUnits; ++unit) {
      const uint8_t* first = u + Format::kUnitColumns * unit;
      for (int i = 0; i < kBytes; ++i) {
        unsigned byte = 0;
        for (int code = 0; code < Format::kCodes; ++code)
          byte |= (first[kBytes * code + i] & ((1u << kBits) - 1)) << kBits * code;
        scratch[kBytes * unit + i] = static_cast<uint8_t>(byte);
      }
    }
    return scratch;
  }
}

// The planes of a row's unit: words of the row's four bytes, plane after plane.
template <class Format>
void put_planes(const SourceBlock& block, int unit, int row, uint8_t* planes) {
  uint32_t words[Format::kUnitPlaneBytes / kPlaneBytes] = {};
  for (int odd = 0; odd < Format::kUnitSubblocks; ++odd) {
    const int subblock = unit * Format::kUnitSubblocks + odd;
    uint8_t u[kSubblockColumns];
    if constexpr (requires { Format::upper(block, subblock, u); }) {
      Format::upper(block, subblock, u);
    } else {
      Format::values(block, subblock, u);
      for (uint8_t& value : u) value = static_cast<uint8_t>(value >> Format::kCodeBits);
    }
    for (int slice = 0; slice < 8; ++slice) {
      words[Format::plane_at(odd, slice) / kPlaneBytes] |= load_as<uint32_t>(u + 4 * slice)
                                                           << Format::shift_at(odd, slice);
    }
  }
  for (uint32_t word : words) {
    store_as(planes + 4 * row, word);
    planes += kPlaneBytes;
  }
}

template <class Format>
bool pack_integers(const uint8_t* const* rows, const void* const* separate, int num_rows, int64_t columns,
                   uint8_t* panel) {
  constexpr int kSourceBlocks = Format::kPanelColumns / Format::kBlockColumns;
  // Without planes between them the units are one section.
  constexpr int kSections = Format::kPlanes > 0 ? Format::kUnits : 1;
  constexpr int kSlices = Format::kUnits * Format::kUnitSlices / kSections;
  const int64_t blocks = columns / Format::kBlockColumns;
  bool finite = true;
  alignas(16) uint8_t scratch[kPanelRows][4 * Format::kUnits * Format::kUnitSlices];
  for (int64_t b = 0; b < blocks; b += kSourceBlocks, panel += Format::kPanelBytes) {
    const int count =
        kSourceBlocks == 1 || blocks - b >= kSourceBlocks ? kSourceBlocks : static_cast<int>(blocks - b);
    if (num_rows < kPanelRows || count < kSourceBlocks) std::memset(panel, 0, Format::kPanelBytes);
    const uint8_t* at[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) {
      at[r] = kMissing<Format::kFlip>.bytes;
      if (r >= num_rows) continue;
      SourceBlock source = source_block<Format>(rows[r], separate == nullptr ? nullptr : separate[r], b);
      source.count = count;
      at[r] = steps_of<Format>(source, scratch[r]);
      for (int i = 0, subblock = 0; i < count; ++i, subblock += Format::kBlockColumns / kSubblockColumns)
        finite &= Format::put_scales(block_at<Format>(source, i), panel, subblock, r);
    }
    finite &= all_finite(kF16Exponent, panel, 2 * kPanelRows * Format::kHalves);
    for (int section = 0; section < kSections; ++section) {
      put_slices<Format::kFlip>(at, kSlices, panel + Format::slices_at(section));
      for (const uint8_t*& row : at) row += 4 * kSlices;
    }
    if constexpr (Format::kPlanes > 0) {
      for (int unit = 0; unit < Format::kUnits; ++unit) {
        for (int r = 0; r < num_rows; ++r)
          put_planes<Format>(source_block<Format>(rows[r], nullptr, b), unit, r,
                             panel + Format::planes_at(unit));
      }
    }
  }
  return finite;
}

}  // namespace

bool pack_panel(WeightFormat format, const void* const* source_rows, const void* const* scales, int num_rows,
                int64_t columns, void* panel) {
  bool finite = true;
  const uint8_t* rows[kPanelRows];
  for (int r = 0; r < num_rows; ++r) rows[r] = static_cast<const uint8_t*>(source_rows[r]);
  uint8_t* to = static_cast<uint8_t*>(panel);
  with_format(format, [&]<class Format>(Format) {
    if constexpr (is_integer<Format>) {
      finite = pack_integers<Format>(rows, scales, num_rows, columns, to);
    } else if constexpr (Format::kScaleGrid > 0) {
      finite = pack_scaled_bytes<Format>(rows, scales, num_rows, columns, to);
    } else {
      finite = put_bytes(Format::kExponent, rows, num_rows, 0, Format::kBlockBytes * columns, to);
    }
  });
  return finite;
}

}  // namespace twofold::kernels
