// GGUF's Q6_K: 256 columns, 6.5625 bits a weight.
//
//   source  u8 low[128]; u8 high[64]; i8 scale[16]; f16 d. Each half of 128 columns: the low nibbles of low[0..63] are
//           columns 0-63, the high ones 64-127; bits 2r, 2r + 1 of high[i] belong to weight i of the half's subblock r.
//   panel   f16 d[32]; i8 scale[16][32], each for a subblock of 16; for each pair p of subblocks of 32 columns: four planes with bits 4 and
//           5 (two slices of both subblocks each), then 8 slices of nibbles
//   weight = d * scale * (q - 32)
#pragma once
#include "scales.h"

namespace twofold::kernels::formats {

struct Q6_KNumbers {
  static constexpr int kScaleAt = 208;
  static int source_number(const uint8_t* block, int half_subblock) {
    return static_cast<int8_t>(block[192 + half_subblock]);
  }
};

struct Q6_K : Panel<256, ScaledNumbers<Q6_KNumbers, SignedBytes, PerHalf>, 6> {
  static constexpr const char *kName = "q6_k", *kGguf = "Q6_K";
  static constexpr int kBlockBytes = 210, kZero = 32;

  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    const int r = subblock % 4;
    const uint8_t* high = block + 128 + subblock / 4 * 32;
    read_nibbles(block + subblock / 4 * 64 + r % 2 * 32, r / 2 * 4, 32, u);
    for (int i = 0; i < 32; ++i) u[i] = static_cast<uint8_t>(u[i] | (high[i] >> (2 * r) & 3u) << 4);
  }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t* scratch) {
    for (int half = 0; half < 2; ++half) {
      pair_nibbles(block + 64 * half, block + 64 * half + 32, 32, scratch + 64 * half);
    }
    return scratch;
  }
  static void upper(const uint8_t* block, int subblock, uint8_t* u) {
    const uint8_t* high = block + 128 + subblock / 4 * 32;
    for (int i = 0; i < 32; ++i) u[i] = high[i] >> (subblock % 4 * 2) & 3u;
  }
  static void quantise(const float* x, const float* w, uint8_t* block);
};

}  // namespace twofold::kernels::formats
