// GGUF's IQ4_NL: 32 columns, 4.5 bits a weight. Blocks and panels are q4_0's; a code stands for a step of a curve.
//
//   weight = scale * curve[q]
#pragma once
#include "q4_0.h"

namespace twofold::kernels::formats {

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, and 128 added.
struct Curve {
  static constexpr uint8_t kTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                         129, 141, 153, 166, 181, 197, 217, 241};
  static constexpr int kDotBits = 8;
};

struct IQ4_NL : Panel<32, OneScale<PerSubblock>, 4, Curve> {
  static constexpr const char *kName = "iq4_nl", *kGguf = "IQ4_NL";
  static constexpr int kBlockBytes = 18, kZero = 128;

  static void values(const uint8_t* block, int, uint8_t* u) { Q4_0::values(block, 0, u); }
  static const uint8_t* slices(const uint8_t* block, int, uint8_t*) { return block + 2; }
};

}  // namespace twofold::kernels::formats
