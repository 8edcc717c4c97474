// GGUF's TQ1_0: ternary weights, 256 columns, 1.6875 bits a weight; in TQ2_0's panels 2.0625.
//
//   source  u8 q[48]; u8 rest[4]; f16 d. A byte b holds the digits of b / 256 in base 3, five in q and four in rest. Digit p of
//           q[i] is weight i of subblock p for i < 32, then weight 160 + 16 p + i - 32; of rest[i] it is weight 240 + 4 p + i
//   weight = d * (digit - 1)
#pragma once
#include "tq2_0.h"

namespace twofold::kernels::formats {

struct TQ1_0 : Panel<256, OneScale<PerSubblock, 52>, 2> {
  static constexpr const char *kName = "tq1_0", *kGguf = "TQ1_0";
  static constexpr int kBlockBytes = 54, kZero = 1;

  // Digit `place` of each of `count` bytes.
  static void digits(const uint8_t* from, int place, int count, uint8_t* u) {
    constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < count; ++i) {
      const uint8_t rest = static_cast<uint8_t>(from[i] * kPowers[place]);
      u[i] = static_cast<uint8_t>(rest * 3 >> 8);
    }
  }
  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    if (subblock < 5) return digits(block, subblock, 32, u);
    digits(block + 32, 2 * (subblock - 5), 16, u);
    if (subblock < 7) return digits(block + 32, 2 * (subblock - 5) + 1, 16, u + 16);
    for (int place = 0; place < 4; ++place) digits(block + 48, place, 4, u + 16 + 4 * place);
  }
};

}  // namespace twofold::kernels::formats
