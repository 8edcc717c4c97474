// Building blocks of integer weight formats. A format is a struct of static members, one header each, that
// packer, CPU kernels, CUDA kernels and the table of sizes are made from; registry.h lists them.
//
//   kName, kGguf     name in files, flags and messages; the name of its type in GGUF, "" without one
//   kBlockBytes      of a source row's block, which covers the columns of a panel block
//   kScale, kZero    where its scales belong; what was added to make weights unsigned
//   values(block, run, u)       the 32 unsigned weights of a run of a source block
//   quantise(x, w, block)       a source block from float32, w weighing the errors; a format without is never written
//   kApartBytes                 of a block whose scales may lie in a tensor of their own
//   kRowHeadBytes               of a source row before its blocks
//   InBlocks                    with one scale for a row, its head: the format that has the same panels and takes q8, and
//   quantise_row(x, w, columns, row)      instead of quantise; w may be null
//   kTable, kDotBits            of formats whose codes are places of a table of 16 (a panel holds codes, values() gives
//                               them): the unsigned weights, and the bits that products need
//   steps(block, scratch), kFlip, upper(block, run, u)     for packing: the same as values(), but faster
// and, from Panel<columns, scales, bits>, the layout of a panel block. `scales` is one of the structs
// below or the format's own:
//   kHeaderBytes, kMin          of the panel block's beginning; whether there are minima
//   put_scales(block, panel, row)      copies those of a source block into a panel block
//   scale<V>(panel, run, g), min<V>(panel, run, g), half_scale<V>(panel, run, half, g)      of the rows of a vector
//   sub_at(run, half), kSub, block_scale<V>(panel, g)      of scales that are a byte's number times their block's: where in
//                             the panel block the 32 rows' bytes lie, what they are, and what multiplies them
//   kSubPairs, block_min<V>(panel, g)      in their stead where a row has two bytes for its run, one for each half: low
//                             nibbles are the scales' integers, high ones those of minima, and what multiplies these
//   source_scale(block, run), source_min(block, run), source_half_scale(block, run, half)
//   half_min<V>(panel, run, half, g), source_half_min(block, run, half)      of formats with minima of 16 columns
//
// V is a vector of rows: g counts vectors from a panel's first row. kLanes rows, kBytes = 4 * kLanes bytes of
// a step; I are those bytes, F a float for each row.
//   load(p), low_nibbles(v), high_nibbles(v), two_bits(v, shift): of each byte
//   with_upper<kBits, kAt>(v, plane, shift): bits shift ... shift + kBits - 1 of each byte of the plane become bits kAt ...
//   of the weight
//   look_up<Codes>(v): bytes of 0 to 15 as what Codes::kTable has there
//   half(p), half_powers(p), unsigned_bytes(p), signed_bytes(p), floats_of_8(p): an f16 or a byte for each row
//   pair_low(p, i), pair_high(p, i): the low or high nibble of byte i of each row's two
//   multipliers(p): an f32 for each row; a negative one stands for what it divides by
//   mul(a, b), negative(v)
#pragma once
#include <cstdint>
#include <cstring>

#include "../host_device.h"
#include "../numbers.h"

namespace twofold::kernels {

inline constexpr int kPanelRows = 32;
inline constexpr int kStepBytes = 4 * kPanelRows;
inline constexpr int kRunColumns = 32;
inline constexpr int kPlaneBytes = kStepBytes;  // bits above the fourth, of 8 bits' worth of steps

// Where the scales of a run belong in the sum.
enum class ScaleOf : uint8_t {
  kRun,    // every run has its own: sum += (f * scale) * x_scale
  kBlock,  // a panel block shares one: it multiplies the sum of the block's f * x_scale
  kHalf,   // every 16 columns have their own
};

// What the bytes are that a block's scale multiplies: integers, or floats of 5 bits of exponent and 3 of mantissa
// (numbers.h: float_of_8).
enum class SubScale : uint8_t { kUnsigned, kSigned, kFloat };

enum class ActivationKind : uint8_t { kF32, kBF16, kQ8, kQ8Token };
inline constexpr int kNumActivationKinds = 4;

template <class Format>
inline constexpr bool is_integer = requires { Format::kScale; };

// One scale for a row of weights, at the head of its source row and again in each of its panel blocks: where
// activations have one scale for a token, a product is one sum of integers.
template <class Format>
inline constexpr bool is_per_channel = requires { typename Format::InBlocks; };

// Columns whose integer sum fits 32 bits whatever the weights and activations are.
inline constexpr int64_t kMostChannelColumns = INT32_MAX / (128 * 127);

// Whether the integers of a run's scales and minima are kSubPairs.
template <class Format>
inline constexpr bool has_sub_pairs = requires { Format::kSubPairs; };

// Whether the unsigned weights are looked up in a table before products.
template <class Format>
inline constexpr bool has_table = requires { Format::kTable; };

// The bytes at p as numbers.
template <class V, SubScale kSub>
TWOFOLD_ALWAYS typename V::F sub_scale(const uint8_t* p) {
  if constexpr (kSub == SubScale::kFloat) {
    return V::floats_of_8(p);
  } else if constexpr (kSub == SubScale::kSigned) {
    return V::signed_bytes(p);
  } else {
    return V::unsigned_bytes(p);
  }
}

namespace formats {

// One f16 for each row, copied from byte kAt of its source block.
template <int kAt>
struct OneScale {
  static constexpr int kHeaderBytes = 2 * kPanelRows, kScaleAt = kAt;
  static constexpr bool kMin = false;
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int, int g) {
    return V::half(panel + 2 * V::kLanes * g);
  }
  static float source_scale(const uint8_t* block, int) { return f16_at(block + kAt); }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    std::memcpy(panel + 2 * row, block + kAt, 2);
  }
};

// The same, and an f16 that is added to each weight.
template <int kAt, int kMinFrom>
struct ScaleAndMin : OneScale<kAt> {
  static constexpr int kHeaderBytes = 4 * kPanelRows, kMinAt = kMinFrom;
  static constexpr bool kMin = true;
  template <class V>
  TWOFOLD_HD static typename V::F min(const uint8_t* panel, int, int g) {
    return V::half(panel + 2 * kPanelRows + 2 * V::kLanes * g);
  }
  static float source_min(const uint8_t* block, int) { return f16_at(block + kMinFrom); }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    OneScale<kAt>::put_scales(block, panel, row);
    std::memcpy(panel + 2 * kPanelRows + 2 * row, block + kMinFrom, 2);
  }
};

// A panel block: the header of its scales, then its units. A unit is the runs that share steps: of 8 bits a run (8
// steps); of 4 to 6 bits a pair of runs (8 steps of nibbles, low ones the first run, high ones the second) or,
// in a block of one run, its two halves (4 steps); of 2 and 3 bits four runs (8 steps of four codes, the lowest bits
// the first run's). Before them lie planes: steps of bytes again, of what the weights have above those bits. A byte
// holds the bits of several of the row's steps, lowest first: of a pair of runs those of the first run's step s, of
// the second's, of the first's step s + 1 ...
// Codes: the values of nibbles, where these are not the values themselves.
struct Themselves {};
template <class Codes>
constexpr int dot_bits(int weight_bits) {
  if constexpr (has_table<Codes>) {
    return Codes::kDotBits;
  } else {
    return weight_bits;
  }
}
template <int kColumns, class Scales, int kWeightBits, class Codes = Themselves>
struct Panel : Scales, Codes {
  static constexpr int kBlockColumns = kColumns, kPanelColumns = kColumns, kBits = kWeightBits;
  static constexpr int kRuns = kColumns / kRunColumns;
  static constexpr int kDotBits = dot_bits<Codes>(kWeightBits);
  static constexpr int kCodeBits = kBits == 8 ? 8 : kBits >= 4 ? 4 : 2;
  static constexpr int kCodes = 8 / kCodeBits;  // of a byte of a step
  static constexpr bool kNibbles = kCodes == 2;
  static constexpr int kPlanes = kBits - kCodeBits;  // of each run
  static constexpr int kUnitRuns = kRuns > 1 ? kCodes : 1;
  static constexpr int kUnits = kRuns / kUnitRuns;
  static constexpr int kGroupRuns = kRuns == 1 ? 1 : kCodes == 4 ? 4 : 2;  // that loops take together
  static constexpr int kUnitColumns = kUnitRuns * kRunColumns;
  static constexpr int kUnitSteps = kUnitRuns * 8 / kCodes;
  static constexpr int kUnitPlaneBytes = kUnitRuns * kPlanes * kPlaneBytes;
  static constexpr int kUnitBytes = kUnitPlaneBytes + kUnitSteps * kStepBytes;
  static constexpr int kPanelBytes = Scales::kHeaderBytes + kUnits * kUnitBytes;
  static constexpr uint8_t kFlip = 0;

  // Offsets in a panel block of a unit's planes and of its steps.
  TWOFOLD_HD static constexpr int planes_at(int unit) { return Scales::kHeaderBytes + unit * kUnitBytes; }
  TWOFOLD_HD static constexpr int steps_at(int unit) { return planes_at(unit) + kUnitPlaneBytes; }
  // The first of the upper bits of a run's step within a unit's planes: its byte for row 0, and its bit.
  TWOFOLD_HD static constexpr int upper_at(int run, int step) { return (kUnitRuns * step + run) * kPlanes; }
  TWOFOLD_HD static constexpr int plane_at(int run, int step) {
    return upper_at(run, step) / 8 * kPlaneBytes;
  }
  TWOFOLD_HD static constexpr int shift_at(int run, int step) { return upper_at(run, step) % 8; }

  // Columns 4 step ... 4 step + 3 of run kGroupRuns * group + run, unsigned.
  template <class V>
  TWOFOLD_ALWAYS static typename V::I bytes(const uint8_t* panel, int group, int run, int step, int g) {
    if constexpr (has_table<Codes>) {
      return V::template look_up<Codes>(codes<V>(panel, group, run, step, g));
    } else {
      return codes<V>(panel, group, run, step, g);
    }
  }

  // The same as the panel has them.
  template <class V>
  TWOFOLD_ALWAYS static typename V::I codes(const uint8_t* panel, int group, int run, int step, int g) {
    if constexpr (kCodes == 1) {
      return V::load(panel + steps_at(kGroupRuns * group + run) + kStepBytes * step + V::kBytes * g);
    } else if constexpr (kCodes == 4) {
      const typename V::I four = V::load(panel + steps_at(group) + kStepBytes * step + V::kBytes * g);
      return with_planes<V>(V::two_bits(four, 2 * run), panel + planes_at(group), run, step, g);
    } else if constexpr (kUnitRuns == 1) {
      const typename V::I both = V::load(panel + steps_at(0) + kStepBytes * (step % 4) + V::kBytes * g);
      return with_planes<V>(step < 4 ? V::low_nibbles(both) : V::high_nibbles(both), panel + planes_at(0), 0,
                            step, g);
    } else {
      const typename V::I both = V::load(panel + steps_at(group) + kStepBytes * step + V::kBytes * g);
      return with_planes<V>(run == 0 ? V::low_nibbles(both) : V::high_nibbles(both), panel + planes_at(group),
                            run, step, g);
    }
  }

  // With the bits above a code's, of the unit's planes.
  template <class V>
  TWOFOLD_ALWAYS static typename V::I with_planes(typename V::I v, const uint8_t* planes, int run, int step,
                                                  int g) {
    if constexpr (kPlanes == 0) return v;
    return V::template with_upper<kPlanes, kCodeBits>(
        v, V::load(planes + plane_at(run, step) + V::kBytes * g), shift_at(run, step));
  }
};

// ---- what source blocks have in common ----

// 32 signed bytes as the panel's.
inline void read_signed(const uint8_t* from, uint8_t* u) {
  for (int i = 0; i < kRunColumns; ++i) u[i] = from[i] ^ 0x80u;
}

// Two bits of each of 32 bytes.
inline void read_two_bits(const uint8_t* from, int shift, uint8_t* u) {
  for (int i = 0; i < kRunColumns; ++i) u[i] = from[i] >> shift & 3u;
}

// The low (shift 0) or high (4) nibbles of `count` bytes.
inline void read_nibbles(const uint8_t* from, int shift, int count, uint8_t* u) {
  for (int i = 0; i < count; ++i) u[i] = from[i] >> shift & 0xfu;
}

}  // namespace formats
}  // namespace twofold::kernels
