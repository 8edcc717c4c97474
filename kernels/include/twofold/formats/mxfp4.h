// MXFP4 of the Open Compute Project: 32 columns, 4.25 bits a weight. A code is a float of 4 bits (E2M1), a scale a
// power of two (E8M0).
//
//   source  u8 exponent; u8 q[16]: low nibbles are columns 0-15, high ones 16-31 (GGUF); or, with the exponents in a
//           tensor of their own, u8 q[16]: columns 2i (low nibble) and 2i + 1 (Hugging Face)
//   panel   u8 (exponent - 1)[2][32]; 8 slices of nibbles (columns 0-31 | 32-63). Of exponents 0 and 1 weights are zero.
//   weight = 2^(exponent - 128) * twice[q]
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

// 2^(exponent - 128), which multiplies twice a weight: a panel's byte is the float's exponent.
struct HalfPowers : NoMinima {
  using Kind = PerSubblock;
  static constexpr int kHeaderBytes = 2 * kPanelRows, kHalves = 0;
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int subblock, int, int g) {
    return V::half_powers(panel + kPanelRows * subblock + V::kLanes * g);
  }
  static uint8_t exponent(const SourceBlock& source) {
    return source.separate == nullptr ? *source.block : *source.separate;
  }
  static float source_scale(const SourceBlock& source, int, int) { return half_of_e8m0(exponent(source)); }
  static bool put_scales(const SourceBlock& source, uint8_t* panel, int subblock, int row) {
    const uint8_t byte = exponent(source);
    panel[kPanelRows * subblock + row] = static_cast<uint8_t>(byte - (byte > 0));
    return byte != 0xff;
  }
};

// 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives, twice each and 16 added. kDotBits: 16 products of at most 12 * 127
// fit 16 bits once the offset is taken away, as those of 4 bits do.
struct E2M1 {
  static constexpr uint8_t kTable[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
  static constexpr int kDotBits = 4;
};

struct MXFP4 : Panel<64, HalfPowers, 4, E2M1> {
  static constexpr const char *kName = "mxfp4", *kGguf = "MXFP4";
  static constexpr int kBlockColumns = 32, kBlockBytes = 17, kZero = 16;
  static constexpr int kSeparateBytes = 16;  // bytes of a block whose exponent lies elsewhere

  static void values(const SourceBlock& source, int, uint8_t* u) {
    if (source.separate == nullptr) return read_halves(source.block + 1, 16, u);
    for (int i = 0; i < kSubblockColumns; ++i) u[i] = source.block[i / 2] >> i % 2 * 4 & 0xfu;
  }
  static const uint8_t* slices(const SourceBlock& source, int count, uint8_t* scratch) {
    constexpr uint8_t kNone[kBlockBytes] = {};
    const bool in_block = source.separate == nullptr;
    const uint8_t* first = source.block;
    const uint8_t* second = count == 1 ? kNone : first + (in_block ? kBlockBytes : kSeparateBytes);
    if (in_block) {
      pair_nibbles(first + 1, second + 1, 16, scratch);
    } else {
      uint16_t pairs[16];  // neighbouring columns of both blocks
      for (int i = 0; i < 16; ++i) {
        const uint32_t even = (first[i] & 0xfu) | (second[i] & 0xfu) << 4;
        pairs[i] = static_cast<uint16_t>(even | (first[i] >> 4 | (second[i] & 0xf0u)) << 8);
      }
      std::memcpy(scratch, pairs, sizeof pairs);
    }
    return scratch;
  }
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
