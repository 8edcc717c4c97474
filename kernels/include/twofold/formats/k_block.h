// What GGUF's Q4_K and Q5_K share: 256 columns, a scale and a minimum of 6 bits for each subblock of 32, times an
// f16.
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

// source  f16 d; f16 dmin; 8 scales and 8 minima of 6 bits in u8[12]
// panel   f16 d[32]; f16 dmin[32]; u8 scale[8][32]; u8 min[8][32]
struct KNumbers {
  static constexpr int kScaleAt = 0, kMinAt = 2;
  static int source_number(const uint8_t* block, int subblock) {
    const uint8_t* packed = block + 4;
    return subblock < 4 ? packed[subblock] & 63
                        : (packed[subblock + 4] & 0xf) | (packed[subblock - 4] >> 6) << 4;
  }
  static int source_min_number(const uint8_t* block, int subblock) {
    const uint8_t* packed = block + 4;
    return subblock < 4 ? packed[subblock + 4] & 63
                        : packed[subblock + 4] >> 4 | (packed[subblock] >> 6) << 4;
  }
};
struct KScales : ScaledNumbers<KNumbers, UnsignedBytes, PerSubblock, 128> {
  static constexpr int kHeaderBytes = 640, kHalves = 2, kMinsAt = 384;
  static constexpr bool kMin = true;

  static float source_min(const uint8_t* block, int subblock, int) {  // subtracted, so negative
    return -(f16_at(block + kMinAt) * static_cast<float>(source_min_number(block, subblock)));
  }
  static bool put_scales(const uint8_t* block, uint8_t* panel, int first, int row) {
    for (int subblock = 0; subblock < 8; ++subblock)
      panel[kMinsAt + 32 * subblock + row] = static_cast<uint8_t>(source_min_number(block, subblock));
    return ScaledNumbers::put_scales(block, panel, first, row) & put_f16(block + kMinAt, panel + 64, row);
  }
  template <class V>
  TWOFOLD_HD static typename V::F min(const uint8_t* panel, int subblock, int, int g) {
    return V::negative(V::mul(V::half(panel + 64 + 2 * V::kLanes * g),
                              V::unsigned_bytes(panel + kMinsAt + 32 * subblock + V::kLanes * g)));
  }
};

// After the scales, with 5 bits only: u8 high[32], bit r of high[i] belonging to weight i of subblock r; then u8
// q[128]: 32 bytes hold a pair of subblocks, low nibbles first.
template <int kWeightBits>
struct KBlock : Panel<256, KScales, kWeightBits> {
  static constexpr int kHighBytes = kWeightBits == 5 ? 32 : 0, kBlockBytes = 144 + kHighBytes, kZero = 0;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    read_nibbles(slices(block, 1, nullptr) + subblock / 2 * 32, subblock % 2 * 4, 32, u);
    if constexpr (kWeightBits == 5) {
      for (int i = 0; i < 32; ++i) u[i] = static_cast<uint8_t>(u[i] | (block[16 + i] >> subblock & 1u) << 4);
    }
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 16 + kHighBytes; }
  static void upper(const uint8_t* block, int subblock, uint8_t* u) {
    for (int i = 0; i < 32; ++i) u[i] = block[16 + i] >> subblock & 1u;
  }
};

}  // namespace twofold::kernels::formats
