// GGUF's Q2_K: 256 columns, 2.625 bits a weight.
//
//   source  u8 scales[16] (of subblocks of 16: low nibble the scale, high one the minimum); u8 q[64]; f16 d; f16 dmin. Bits 2r,
//           2r + 1 of q[32 h + i] belong to weight i of subblock 4h + r.
//   panel   f16 d[32]; f16 dmin[32]; u8 scales[8][32][2]; for each four subblocks of 32 columns: 8 slices of four codes
//   weight = d * scale * q - dmin * min
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct PairedScales {
  using Kind = PerHalf;
  using Sub = NibblePairs;
  static constexpr int kHeaderBytes = 640, kHalves = 2, kScaleAt = 80, kMinAt = 82;
  static constexpr bool kMin = true;

  static float source_scale(const uint8_t* block, int subblock, int half) {
    return f16_at(block + kScaleAt) * static_cast<float>(block[2 * subblock + half] & 0xf);
  }
  static float source_min(const uint8_t* block, int subblock, int half) {  // subtracted, so negative
    return -(f16_at(block + kMinAt) * static_cast<float>(block[2 * subblock + half] >> 4));
  }
  static bool put_scales(const uint8_t* block, uint8_t* panel, int, int row) {
    for (int subblock = 0; subblock < 8; ++subblock)
      std::memcpy(panel + sub_at(subblock, 0) + 2 * row, block + 2 * subblock, 2);
    return put_f16(block + kScaleAt, panel, row) & put_f16(block + kMinAt, panel + 64, row);
  }
  TWOFOLD_HD static constexpr int sub_at(int subblock, int) { return 128 + 64 * subblock; }
  template <class V>
  TWOFOLD_HD static typename V::F block_scale(const uint8_t* panel, int g) {
    return V::half(panel + 2 * V::kLanes * g);
  }
  template <class V>
  TWOFOLD_HD static typename V::F block_min(const uint8_t* panel, int g) {
    return V::negative(V::half(panel + 64 + 2 * V::kLanes * g));
  }
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int subblock, int half, int g) {
    return V::mul(block_scale<V>(panel, g), numbers_of<V, PairedScales>(panel, subblock, half, g));
  }
  template <class V>
  TWOFOLD_HD static typename V::F min(const uint8_t* panel, int subblock, int half, int g) {
    return V::mul(block_min<V>(panel, g),
                  V::pair_high(panel + sub_at(subblock, 0) + 2 * V::kLanes * g, half));
  }
};

struct Q2_K : Panel<256, PairedScales, 2> {
  static constexpr const char *kName = "q2_k", *kGguf = "Q2_K";
  static constexpr int kBlockBytes = 84, kZero = 0;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    read_two_bits(slices(block, 1, nullptr) + subblock / 4 * 32, subblock % 4 * 2, u);
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 16; }
};

}  // namespace twofold::kernels::formats
