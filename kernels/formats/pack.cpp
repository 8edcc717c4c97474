// Source rows into panels: a transposition of 4-byte words, as fast as rows come from a disk.
#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

using Four = uint32_t __attribute__((vector_size(16)));
using Bytes = uint8_t __attribute__((vector_size(16)));

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

constexpr int kChunkSteps = 64;  // taken from four rows at once: 8 KiB of a panel

// What the rows that a panel misses are read from: zero weights, before and after their offset is added.
alignas(16) constexpr uint8_t kZeros[4 * kChunkSteps] = {};
struct Flipped {
  uint8_t bytes[4 * kChunkSteps];
};
constexpr Flipped flipped_zeros() {
  Flipped all{};
  for (uint8_t& byte : all.bytes) byte = 0x80;
  return all;
}
constexpr Flipped kFlippedZeros = flipped_zeros();

// `steps` steps (at most kChunkSteps) of 32 rows into a panel, each byte xored with Flip.
template <uint8_t Flip = 0>
void put_steps(const uint8_t* const* rows, int steps, uint8_t* to) {
  const uint32_t flip = 0x01010101u * Flip;
  for (int r = 0; r < kPanelRows; r += 4) {
    const uint8_t *a = rows[r], *b = rows[r + 1], *c = rows[r + 2], *d = rows[r + 3];
    uint8_t* out = to + 4 * r;
    int s = 0;
    for (; s + 4 <= steps; s += 4, out += 4 * kStepBytes) {
      const Four va = load_as<Four>(a + 4 * s) ^ flip, vb = load_as<Four>(b + 4 * s) ^ flip;
      const Four vc = load_as<Four>(c + 4 * s) ^ flip, vd = load_as<Four>(d + 4 * s) ^ flip;
      const Four ab = __builtin_shufflevector(va, vb, 0, 4, 1, 5),
                 cd = __builtin_shufflevector(vc, vd, 0, 4, 1, 5);
      const Four ef = __builtin_shufflevector(va, vb, 2, 6, 3, 7),
                 gh = __builtin_shufflevector(vc, vd, 2, 6, 3, 7);
      store_as(out, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
      store_as(out + kStepBytes, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
      store_as(out + 2 * kStepBytes, __builtin_shufflevector(ef, gh, 0, 1, 4, 5));
      store_as(out + 3 * kStepBytes, __builtin_shufflevector(ef, gh, 2, 3, 6, 7));
    }
    for (; s < steps; ++s, out += kStepBytes) {
      for (int i = 0; i < 4; ++i) store_as(out + 4 * i, load_as<uint32_t>(rows[r + i] + 4 * s) ^ flip);
    }
  }
}

// Writes rows of plain bytes: 4 bytes per step, zeros after the last. Returns whether all elements are finite.
template <class Word>
bool put_bytes(Word exponent, const uint8_t* const* rows, int num_rows, int64_t first, int64_t num_bytes,
               uint8_t* to) {
  const uint8_t* at[kPanelRows];
  bool finite = true;
  int64_t byte = 0;
  for (; byte + 4 <= num_bytes; byte += 4 * kChunkSteps) {
    const int64_t steps = (num_bytes - byte) / 4;
    const int here = static_cast<int>(steps < kChunkSteps ? steps : kChunkSteps);
    for (int r = 0; r < kPanelRows; ++r) at[r] = r < num_rows ? rows[r] + first + byte : kZeros;
    put_steps(at, here, to + byte / 4 * kStepBytes);
    finite &= all_finite(exponent, to + byte / 4 * kStepBytes, here * kStepBytes);
  }
  const int64_t rest = num_bytes % 4;
  if (rest == 0) return finite;
  uint8_t* last = to + num_bytes / 4 * kStepBytes;
  std::memset(last, 0, kStepBytes);
  for (int r = 0; r < num_rows; ++r) {
    std::memcpy(last + 4 * r, rows[r] + first + num_bytes - rest, static_cast<size_t>(rest));
  }
  return finite & all_finite(exponent, last, kStepBytes);
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

// The steps of a source block's row, unit after unit; in place, or in scratch.
template <class Format>
const uint8_t* steps_of(const uint8_t* block, uint8_t* scratch) {
  if constexpr (requires { Format::steps(block, scratch); }) {
    return Format::steps(block, scratch);
  } else {
    static_assert(Format::kCodes < 4, "says which steps");
    uint8_t u[Format::kBlockColumns];
    uint8_t* const values = Format::kNibbles ? u : scratch;
    for (int run = 0; run < Format::kRuns; ++run) Format::values(block, run, values + kRunColumns * run);
    constexpr int kHalf = Format::kUnitColumns / 2;  // of a unit's columns are low nibbles
    for (int i = 0; i < Format::kBlockColumns / 2 && Format::kNibbles; ++i) {
      const uint8_t* low = values + i / kHalf * Format::kUnitColumns + i % kHalf;
      scratch[i] = static_cast<uint8_t>((low[0] & 0xfu) | low[kHalf] << 4);
    }
    return scratch;
  }
}

// The planes of a row's unit: words of the row's four bytes, plane after plane.
template <class Format>
void put_planes(const uint8_t* block, int unit, int row, uint8_t* planes) {
  uint32_t words[Format::kUnitPlaneBytes / kPlaneBytes] = {};
  for (int odd = 0; odd < Format::kUnitRuns; ++odd) {
    const int run = unit * Format::kUnitRuns + odd;
    uint8_t u[kRunColumns];
    if constexpr (requires { Format::upper(block, run, u); }) {
      Format::upper(block, run, u);
    } else {
      Format::values(block, run, u);
      for (uint8_t& value : u) value = static_cast<uint8_t>(value >> Format::kCodeBits);
    }
    for (int step = 0; step < 8; ++step) {
      words[Format::plane_at(odd, step) / kPlaneBytes] |= load_as<uint32_t>(u + 4 * step)
                                                          << Format::shift_at(odd, step);
    }
  }
  for (uint32_t word : words) {
    store_as(planes + 4 * row, word);
    planes += kPlaneBytes;
  }
}

template <class Format>
bool pack_blocks(const uint8_t* const* rows, int num_rows, int64_t columns, uint8_t* panel) {
  // Without planes between them the units are one section.
  constexpr int kSections = Format::kPlanes > 0 ? Format::kUnits : 1;
  constexpr int kSteps = Format::kUnits * Format::kUnitSteps / kSections;
  constexpr int kFloatBytes =
      2 * kPanelRows * (Format::kMin ? 2 : 1);  // a panel block begins with its f16 scales
  bool finite = true;
  uint8_t scratch[kPanelRows][4 * Format::kUnits * Format::kUnitSteps];
  for (int64_t b = 0; b < columns / Format::kBlockColumns; ++b, panel += Format::kPanelBytes) {
    if (num_rows < kPanelRows) std::memset(panel, 0, Format::kPanelBytes);  // the scales of missing rows
    const uint8_t* at[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) {
      at[r] = Format::kFlip != 0 ? kFlippedZeros.bytes : kZeros;
      if (r >= num_rows) continue;
      const uint8_t* block = rows[r] + b * Format::kBlockBytes;
      Format::put_scales(block, panel, r);
      at[r] = steps_of<Format>(block, scratch[r]);
    }
    finite &= all_finite(kF16Exponent, panel, kFloatBytes);
    for (int section = 0; section < kSections; ++section) {
      put_steps<Format::kFlip>(at, kSteps, panel + Format::steps_at(section));
      for (const uint8_t*& row : at) row += 4 * kSteps;
    }
    if constexpr (Format::kPlanes > 0) {
      for (int unit = 0; unit < Format::kUnits; ++unit) {
        for (int r = 0; r < num_rows; ++r) {
          put_planes<Format>(rows[r] + b * Format::kBlockBytes, unit, r, panel + Format::planes_at(unit));
        }
      }
    }
  }
  return finite;
}

// The codes of 32 columns, columns 0-15 in low nibbles, from a block or from where neighbours share a byte.
template <class Format>
Bytes codes_of(const uint8_t* row, bool apart, int64_t block) {
  if (!apart) return load_as<Bytes>(row + block * Format::kBlockBytes + 1);
  const Bytes pairs = load_as<Bytes>(row + block * Format::kApartBytes);
  const Bytes even = pairs & 0xf, odd = pairs >> 4;
  const Bytes first =
      __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Bytes last =
      __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return first | last << 4;
}

// Two source blocks to a panel block; `exponents` may be null: they are in the rows.
template <class Format>
bool pack_pairs(const uint8_t* const* rows, const void* const* exponents, int num_rows, int64_t columns,
                uint8_t* panel) {
  const int64_t blocks = columns / Format::kBlockColumns;
  constexpr uint8_t kNaN = 0xff;
  bool finite = true;
  alignas(16) uint8_t scratch[kPanelRows][32];
  const uint8_t* at[kPanelRows];
  for (int64_t b = 0; b < blocks; b += 2, panel += Format::kPanelBytes) {
    std::memset(panel, 0, Format::kHeaderBytes);
    for (int r = 0; r < kPanelRows; ++r) {
      at[r] = kZeros;
      if (r >= num_rows) continue;
      const bool apart = exponents != nullptr, both = b + 1 < blocks;
      const Bytes first = codes_of<Format>(rows[r], apart, b);
      const Bytes second = both ? codes_of<Format>(rows[r], apart, b + 1) : Bytes{};
      store_as(scratch[r], (first & 0xf) | second << 4);
      store_as(scratch[r] + 16, first >> 4 | (second & 0xf0));
      at[r] = scratch[r];
      for (int run = 0; run < (both ? 2 : 1); ++run) {
        const uint8_t exponent = apart ? static_cast<const uint8_t*>(exponents[r])[b + run]
                                       : rows[r][(b + run) * Format::kBlockBytes];
        finite &= exponent != kNaN;
        panel[kPanelRows * run + r] = static_cast<uint8_t>(exponent - (exponent > 0));
      }
    }
    put_steps(at, 8, panel + Format::kHeaderBytes);
  }
  return finite;
}

// NVFP4: four source blocks to a panel block, which repeats the row's f32.
template <class Format>
bool pack_halves(const uint8_t* const* rows, int num_rows, int64_t columns, uint8_t* panel) {
  constexpr int64_t kBlocks = Format::kPanelColumns / Format::kBlockColumns;
  constexpr int kRunsOfBlock = Format::kBlockColumns / kRunColumns;
  static_assert(kRunsOfBlock == 2 && Format::kUnitRuns == 2, "a source block is a unit");
  const int64_t blocks = columns / Format::kBlockColumns;
  alignas(16) uint8_t scratch[kPanelRows][Format::kPanelColumns / 2];
  const uint8_t* at[kPanelRows];
  bool finite = true;
  for (int r = 0; r < num_rows; ++r) {
    finite &= (load_as<uint32_t>(rows[r]) & kF32Exponent) != kF32Exponent;
  }
  for (int64_t b = 0; b < blocks; b += kBlocks, panel += Format::kPanelBytes) {
    const int64_t here = blocks - b < kBlocks ? blocks - b : kBlocks;
    std::memset(panel, 0, Format::kHeaderBytes);
    for (int r = 0; r < kPanelRows; ++r) {
      at[r] = kZeros;
      if (r >= num_rows) continue;
      at[r] = scratch[r];
      store_as(panel + 4 * r, Format::stored(load_as<float>(rows[r])));
      if (here < kBlocks) std::memset(scratch[r], 0, sizeof scratch[r]);
      const uint8_t* block = rows[r] + Format::kRowHeadBytes + b * Format::kBlockBytes;
      for (int64_t i = 0; i < here; ++i, block += Format::kBlockBytes) {
        for (int sixteen = 0; sixteen < 4; ++sixteen) {
          const int run = static_cast<int>(kRunsOfBlock * i) + sixteen / 2;
          panel[Format::sub_at(run, sixteen % 2) + r] = Format::code_of_e4m3(block[sixteen]);
          // Columns 0-7 of sixteen and then 8-15 are two steps each; the second run's become high nibbles.
          const uint64_t eight = load_as<uint64_t>(block + 4 + 8 * sixteen), mask = 0x0f0f0f0f0f0f0f0f;
          const uint64_t low = eight & mask, high = eight >> 4 & mask;
          uint8_t* to = scratch[r] + 32 * i + 16 * (sixteen % 2);
          if (sixteen < 2) {
            store_as(to, low);
            store_as(to + 8, high);
          } else {
            store_as(to, load_as<uint64_t>(to) | low << 4);
            store_as(to + 8, load_as<uint64_t>(to + 8) | high << 4);
          }
        }
      }
    }
    put_steps(at, Format::kUnits * Format::kUnitSteps, panel + Format::kHeaderBytes);
  }
  return finite;
}

// Rows with one scale each, which every panel block repeats.
template <class Format>
bool pack_channels(const uint8_t* const* rows, int num_rows, int64_t columns, uint8_t* panel) {
  constexpr int kSteps = Format::kUnits * Format::kUnitSteps;
  constexpr int64_t kColumnsOfStep = Format::kPanelColumns / kSteps;
  static_assert(kSteps <= kChunkSteps && Format::kPlanes == 0);
  static_assert(!Format::kNibbles || Format::kBlockColumns == Format::kPanelColumns, "halves of nibbles");
  bool finite = true;
  for (int64_t k = 0; k < columns; k += Format::kPanelColumns, panel += Format::kPanelBytes) {
    const int64_t rest = columns - k < Format::kPanelColumns ? columns - k : Format::kPanelColumns;
    const uint8_t* at[kPanelRows];
    std::memset(panel, 0, Format::kHeaderBytes);
    for (int r = 0; r < kPanelRows; ++r) {
      at[r] = Format::kFlip != 0 ? kFlippedZeros.bytes : kZeros;
      if (r >= num_rows) continue;
      Format::put_scales(rows[r], panel, r);
      at[r] = rows[r] + Format::kRowHeadBytes + k / Format::kBlockColumns * Format::kBlockBytes;
    }
    finite &= all_finite(kF16Exponent, panel, 2 * kPanelRows);
    uint8_t* const steps = panel + Format::kHeaderBytes;
    std::memset(steps, Format::kFlip, kSteps * kStepBytes);
    put_steps<Format::kFlip>(at, static_cast<int>(rest / kColumnsOfStep), steps);
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
    if constexpr (is_per_channel<Format>) {
      finite = pack_channels<Format>(rows, num_rows, columns, to);
    } else if constexpr (requires { Format::kRowHeadBytes; }) {
      finite = pack_halves<Format>(rows, num_rows, columns, to);
    } else if constexpr (requires { Format::kApartBytes; }) {
      finite = pack_pairs<Format>(rows, scales, num_rows, columns, to);
    } else if constexpr (is_integer<Format>) {
      finite = pack_blocks<Format>(rows, num_rows, columns, to);
    } else if constexpr (requires { Format::kScaleGrid; }) {
      finite = pack_scaled_bytes<Format>(rows, scales, num_rows, columns, to);
    } else {
      finite = put_bytes(Format::kExponent, rows, num_rows, 0, Format::kBlockBytes * columns, to);
    }
  });
  return finite;
}

}  // namespace twofold::kernels
