// Building blocks of integer weight formats. A format is a struct of static members, one header each, that
// packer, CPU kernels, CUDA kernels and the table of sizes are made from; registry.h lists them. It is a Panel of three
// policies, which answer for it wherever a kernel asks: Panel<columns, scales, bits, codes>. The format itself adds
//
//   kName, kGguf     name in files, flags and messages; name of its GGUF type, "" without one
//   kBlockBytes      bytes of a source row's block; kBlockColumns if it has fewer columns than a panel block
//   kZero            what was added to make the weights unsigned
//   values(source, subblock, u)      the 32 codes of a subblock of a source block: unsigned weights, or places in the codes' table
//   quantise(x, w, block)       optional: a source block from float32, w weighing the errors; without it never written
//   slices(source, count, scratch), kFlip, upper(source, subblock, u)     optional, for fast packing; the same as values()
//   kRowHeadBytes, kSeparateBytes  optional: bytes of a source row before its blocks; of a block whose scale lies apart
//   InBlocks, quantise_row()    of formats with one scale for a row, its head: the format with the same panels that takes
//                               q8; and the whole row instead of quantise(), w may be null
//
// Scales (scales.h, or the format's own):
//   Kind             PerSubblock, PerBlock or PerHalf: where scales belong in the sum, and how a sum of integers joins a total
//   kHeaderBytes, kMin          beginning of a panel block; whether weights have minima
//   put_scales(source, panel, subblock, row)      copies a source block's into a panel block, whose subblocks from `subblock` on are
//                                            the source's; false: a scale is an infinity or a NaN
//   kHalves          vectors of 32 f16 that a panel block begins with; the packer checks that these are finite
//   scale<V>(panel, subblock, half, g), min<V>(panel, subblock, half, g)      of a vector of rows
//   source_scale(source, subblock, half), source_min(source, subblock, half)
//   Sub, sub_at(subblock, half), block_scale<V>(panel, g)      optional: scales that are numbers of a few bits times their
//                    block's. How the numbers are read, where in a panel block they lie, and what multiplies them
//   block_min<V>(panel, g)      what multiplies the minima's integers, of Sub == NibblePairs with minima
//
// Codes: Themselves, or a table of 16 unsigned weights: kTable, and kDotBits, the bits that products need.
//
// V is a vector of rows: g counts vectors from a panel's first row. kLanes rows, kBytes = 4 * kLanes bytes of
// a slice; I are those bytes, F a float for each row.
//   load(p), low_nibbles(v), high_nibbles(v), two_bits(v, shift): of each byte
//   with_upper<kBits, kAt>(v, plane, shift): bits shift ... shift + kBits - 1 of each byte of the plane become bits kAt ...
//   in the weight
//   look_up<Codes>(v): bytes of 0 to 15 as what Codes::kTable has there
//   half(p), half_powers(p), unsigned_bytes(p), signed_bytes(p), floats_of_8(p): an f16 or a byte for each row
//   pair_low(p, i), pair_high(p, i): the low or high nibble of byte i of each row's two
//   multipliers(p): an f32 for each row; a negative one stands for what it divides by
//   set1(v), mul(a, b), negative(v)
#pragma once
#include <cstdint>
#include <cstring>

#include "../host_device.h"
#include "../numbers.h"

namespace twofold::kernels {

inline constexpr int kPanelRows = 32;
inline constexpr int kSliceBytes = 4 * kPanelRows;
inline constexpr int kSubblockColumns = 32;
inline constexpr int kPlaneBytes = kSliceBytes;  // bits above the fourth, for 8 bits' worth of slices

enum class ActivationKind : uint8_t { kF32, kBF16, kQ8, kQ8Token };
inline constexpr int kNumActivationKinds = 4;

template <class Format>
inline constexpr bool is_integer = requires { typename Format::Kind; };

// One scale for a row of weights, at the head of its source row and again in each of its panel blocks: where
// activations have one scale for a token, a product is one sum of integers.
template <class Format>
inline constexpr bool is_per_channel = requires { typename Format::InBlocks; };

// Columns whose integer sum fits 32 bits whatever the weights and activations are.
inline constexpr int64_t kMostChannelColumns = INT32_MAX / (128 * 127);

// Whether the unsigned weights are looked up in a table before products.
template <class Format>
inline constexpr bool has_table = requires { Format::kTable; };

// A block of a source row.
struct SourceBlock {
  const uint8_t* block;
  const uint8_t* row;       // the row's beginning, where a scale may be
  const uint8_t* separate;  // the block's scale, where scales lie apart from the rows; else null
  int count = 1;            // source blocks from this one on that belong to a panel block

  operator const uint8_t*() const { return block; }
};

template <class Format>
SourceBlock source_block(const uint8_t* row, const void* separate, int64_t index) {
  if (Format::kSeparateBytes > 0 && separate != nullptr)
    return {row + index * Format::kSeparateBytes, row, static_cast<const uint8_t*>(separate) + index};
  return {row + Format::kRowHeadBytes + index * Format::kBlockBytes, row, nullptr};
}

namespace formats {

// A panel block: the header of its scales, then its units. A unit is the subblocks that share slices: of 8 bits a subblock (8
// slices); of 4 to 6 bits a pair of subblocks (8 slices of nibbles, low ones the first subblock, high ones the second) or,
// in a block of one subblock, its two halves (4 slices); of 2 and 3 bits four subblocks (8 slices of four codes, the lowest bits
// the first subblock's). Before them lie planes: slices of bytes again, of what the weights have above those bits. A byte
// holds the bits of several of the row's slices, lowest first: of a pair of subblocks those of the first subblock's slice s, of
// the second's, of the first's slice s + 1 ...
struct IdentityCodes {};
template <class Codes>
constexpr int dot_bits(int weight_bits) {
  if constexpr (has_table<Codes>) {
    return Codes::kDotBits;
  } else {
    return weight_bits;
  }
}
template <int kColumns, class Scales, int kWeightBits, class Codes = IdentityCodes>
struct Panel : Scales, Codes {
  static constexpr int kBlockColumns = kColumns, kPanelColumns = kColumns, kBits = kWeightBits;
  static constexpr int kSubblocks = kColumns / kSubblockColumns;
  static constexpr int kDotBits = dot_bits<Codes>(kWeightBits);
  static constexpr int kCodeBits = kBits == 8 ? 8 : kBits >= 4 ? 4 : 2;
  static constexpr int kCodes = 8 / kCodeBits;  // in a byte of a slice
  static constexpr bool kNibbles = kCodes == 2;
  static constexpr int kPlanes = kBits - kCodeBits;  // for each subblock
  static constexpr int kUnitSubblocks = kSubblocks > 1 ? kCodes : 1;
  static constexpr int kUnits = kSubblocks / kUnitSubblocks;
  static constexpr int kGroupSubblocks = kSubblocks == 1 ? 1
                                         : kCodes == 4   ? 4
                                                         : 2;  // that loops take together
  static constexpr int kUnitColumns = kUnitSubblocks * kSubblockColumns;
  static constexpr int kUnitSlices = kUnitSubblocks * 8 / kCodes;
  static constexpr int kUnitPlaneBytes = kUnitSubblocks * kPlanes * kPlaneBytes;
  static constexpr int kUnitBytes = kUnitPlaneBytes + kUnitSlices * kSliceBytes;
  static constexpr int kPanelBytes = Scales::kHeaderBytes + kUnits * kUnitBytes;
  static constexpr uint8_t kFlip = 0;
  static constexpr int kScaleGrid = 0, kRowHeadBytes = 0, kSeparateBytes = 0;

  // Offsets in a panel block of a unit's planes and of its slices.
  TWOFOLD_HD static constexpr int planes_at(int unit) { return Scales::kHeaderBytes + unit * kUnitBytes; }
  TWOFOLD_HD static constexpr int slices_at(int unit) { return planes_at(unit) + kUnitPlaneBytes; }
  // The first of the upper bits of a subblock's slice within a unit's planes: its byte for row 0, and its bit.
  TWOFOLD_HD static constexpr int upper_at(int subblock, int slice) {
    return (kUnitSubblocks * slice + subblock) * kPlanes;
  }
  TWOFOLD_HD static constexpr int plane_at(int subblock, int slice) {
    return upper_at(subblock, slice) / 8 * kPlaneBytes;
  }
  TWOFOLD_HD static constexpr int shift_at(int subblock, int slice) { return upper_at(subblock, slice) % 8; }

  // Columns 4 slice ... 4 slice + 3 of subblock kGroupSubblocks * group + subblock, unsigned.
  template <class V>
  TWOFOLD_ALWAYS static typename V::I bytes(const uint8_t* panel, int group, int subblock, int slice, int g) {
    if constexpr (has_table<Codes>) {
      return V::template look_up<Codes>(codes<V>(panel, group, subblock, slice, g));
    } else {
      return codes<V>(panel, group, subblock, slice, g);
    }
  }

  // The same as the panel has them.
  template <class V>
  TWOFOLD_ALWAYS static typename V::I codes(const uint8_t* panel, int group, int subblock, int slice, int g) {
    if constexpr (kCodes == 1) {
      return V::load(panel + slices_at(kGroupSubblocks * group + subblock) + kSliceBytes * slice +
                     V::kBytes * g);
    } else if constexpr (kCodes == 4) {
      const typename V::I four = V::load(panel + slices_at(group) + kSliceBytes * slice + V::kBytes * g);
      return with_planes<V>(V::two_bits(four, 2 * subblock), panel + planes_at(group), subblock, slice, g);
    } else if constexpr (kUnitSubblocks == 1) {
      const typename V::I both = V::load(panel + slices_at(0) + kSliceBytes * (slice % 4) + V::kBytes * g);
      return with_planes<V>(slice < 4 ? V::low_nibbles(both) : V::high_nibbles(both), panel + planes_at(0), 0,
                            slice, g);
    } else {
      const typename V::I both = V::load(panel + slices_at(group) + kSliceBytes * slice + V::kBytes * g);
      return with_planes<V>(subblock == 0 ? V::low_nibbles(both) : V::high_nibbles(both),
                            panel + planes_at(group), subblock, slice, g);
    }
  }

  // With the bits above a code's, of the unit's planes.
  template <class V>
  TWOFOLD_ALWAYS static typename V::I with_planes(typename V::I v, const uint8_t* planes, int subblock,
                                                  int slice, int g) {
    if constexpr (kPlanes == 0) return v;
    return V::template with_upper<kPlanes, kCodeBits>(
        v, V::load(planes + plane_at(subblock, slice) + V::kBytes * g), shift_at(subblock, slice));
  }
};

// ---- what source blocks have in common ----

// 32 signed bytes as the panel's.
inline void read_signed(const uint8_t* from, uint8_t* u) {
  for (int i = 0; i < kSubblockColumns; ++i) u[i] = from[i] ^ 0x80u;
}

// Two bits of each of 32 bytes.
inline void read_two_bits(const uint8_t* from, int shift, uint8_t* u) {
  for (int i = 0; i < kSubblockColumns; ++i) u[i] = from[i] >> shift & 3u;
}

// The low (shift 0) or high (4) nibbles of `count` bytes.
inline void read_nibbles(const uint8_t* from, int shift, int count, uint8_t* u) {
  for (int i = 0; i < count; ++i) u[i] = from[i] >> shift & 0xfu;
}

// The low nibbles of `count` bytes, then the high ones.
inline void read_halves(const uint8_t* from, int count, uint8_t* u) {
  read_nibbles(from, 0, count, u);
  read_nibbles(from, 4, count, u + count);
}

// The bits of a byte, each in a byte of its own, the lowest first; pairs of bits of 16; nibbles of 16 in 4 bytes.
inline uint64_t spread_bits(uint32_t bits) {
  const uint64_t ones = 0x0101010101010101u, each = bits * ones & 0x8040201008040201u;
  return (each + 0x7f * ones) >> 7 & ones;
}
inline uint64_t spread_pairs(uint32_t bits) {
  uint64_t v = (bits | static_cast<uint64_t>(bits) << 24) & 0x000000ff000000ffu;
  v = (v | v << 12) & 0x000f000f000f000fu;
  return (v | v << 6) & 0x0303030303030303u;
}
inline uint32_t spread_nibbles(uint32_t bits) {
  const uint32_t v = (bits | bits << 8) & 0x00ff00ffu;
  return (v | v << 4) & 0x0f0f0f0fu;
}

// Seven signs and an eighth that makes their number even.
inline uint32_t even_signs(uint32_t seven) {
  return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7;
}

// Nibbles of two subblocks as slices: the first's low and high ones become low nibbles, the second's high ones.
inline void pair_nibbles(const uint8_t* __restrict first, const uint8_t* __restrict second, int count,
                         uint8_t* __restrict to) {
  for (int i = 0; i < count; ++i) {
    to[i] = static_cast<uint8_t>((first[i] & 0xfu) | second[i] << 4);
    to[count + i] = static_cast<uint8_t>(first[i] >> 4 | (second[i] & 0xf0u));
  }
}

}  // namespace formats
}  // namespace twofold::kernels
