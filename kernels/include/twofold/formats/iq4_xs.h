// GGUF's IQ4_XS: 256 columns, 4.25 bits a weight. IQ4_NL's curve; each run of 32 has a scale of 6 bits, times an f16.
//
//   source  f16 d; u16 high; u8 low[4]; u8 q[128]. Nibble r of low and bits 2r, 2r + 1 of high are run r's scale, 32 added;
//           of each run's 16 bytes of q low nibbles are columns 0-15, high ones 16-31
//   panel   f16 d[32]; i8 scale[8][32]; for each pair p of runs: 8 steps of nibbles (run 2p | run 2p + 1)
//   weight = d * scale * curve[q]
#pragma once
#include "iq4_nl.h"

namespace twofold::kernels::formats {

struct RunScales {
  static constexpr int kHeaderBytes = 320, kScaleAt = 0;
  static constexpr bool kMin = false;

  static int source_scale_bits(const uint8_t* block, int run) {
    const int low = block[4 + run / 2] >> run % 2 * 4 & 0xf;
    return low | (load_as<uint16_t>(block + 2) >> 2 * run & 3) << 4;
  }
  static float source_scale(const uint8_t* block, int run) {
    return f16_at(block) * static_cast<float>(source_scale_bits(block, run) - 32);
  }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    std::memcpy(panel + 2 * row, block, 2);
    for (int run = 0; run < 8; ++run)
      panel[sub_at(run, 0) + row] = static_cast<uint8_t>(source_scale_bits(block, run) - 32);
  }
  static constexpr SubScale kSub = SubScale::kSigned;
  TWOFOLD_HD static constexpr int sub_at(int run, int) { return 64 + 32 * run; }
  template <class V>
  TWOFOLD_HD static typename V::F block_scale(const uint8_t* panel, int g) {
    return V::half(panel + 2 * V::kLanes * g);
  }
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int run, int g) {
    return V::mul(block_scale<V>(panel, g), V::signed_bytes(panel + sub_at(run, 0) + V::kLanes * g));
  }
};

struct IQ4_XS : Panel<256, RunScales, 4, Curve> {
  static constexpr const char *kName = "iq4_xs", *kGguf = "IQ4_XS";
  static constexpr int kBlockBytes = 136, kZero = 128;
  static constexpr ScaleOf kScale = ScaleOf::kRun;

  static void values(const uint8_t* block, int run, uint8_t* u) {
    read_nibbles(block + 8 + 16 * run, 0, 16, u);
    read_nibbles(block + 8 + 16 * run, 4, 16, u + 16);
  }
  static const uint8_t* steps(const uint8_t* block, uint8_t* scratch) {
    for (int pair = 0; pair < 4; ++pair) {
      const uint8_t *first = block + 8 + 32 * pair, *second = first + 16;
      uint8_t* to = scratch + 32 * pair;
      for (int i = 0; i < 16; ++i) {
        to[i] = static_cast<uint8_t>((first[i] & 0xfu) | second[i] << 4);
        to[16 + i] = static_cast<uint8_t>(first[i] >> 4 | (second[i] & 0xf0u));
      }
    }
    return scratch;
  }
};

}  // namespace twofold::kernels::formats
