// GGUF's Q5_0: 32 columns, 5.5 bits a weight; and what Q5_1 shares with it.
//
//   source  f16 scale; u32 high, whose bit i belongs to weight i; u8 q[16]: low nibbles are columns 0-15, high ones 16-31
//   panel   f16 scale[32]; a plane with bit 4 of the 8 slices; 4 slices of nibbles (columns 0-15 | 16-31)
//   weight = scale * (q - 16)
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

// kHighAt: where the u32 is in a source block.
template <class Scales, int kHighAt>
struct FiveBits : Panel<32, Scales, 5> {
  static constexpr int kBlockBytes = kHighAt + 20;

  static void values(const uint8_t* block, int, uint8_t* u) {
    read_halves(slices(block, 1, nullptr), 16, u);
    uint8_t high[kSubblockColumns];
    upper(block, 0, high);
    for (int i = 0; i < kSubblockColumns; ++i) u[i] = static_cast<uint8_t>(u[i] | high[i] << 4);
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + kHighAt + 4; }
  static void upper(const uint8_t* block, int, uint8_t* u) {
    const uint32_t high = load_as<uint32_t>(block + kHighAt);
    for (int i = 0; i < kSubblockColumns; ++i) u[i] = high >> i & 1u;
  }
};

struct Q5_0 : FiveBits<OneScale<PerSubblock>, 2> {
  static constexpr const char *kName = "q5_0", *kGguf = "Q5_0";
  static constexpr int kZero = 16;
};

}  // namespace twofold::kernels::formats
