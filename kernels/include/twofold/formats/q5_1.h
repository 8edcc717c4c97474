// GGUF's Q5_1: 32 columns, 6 bits a weight.
//
//   source  f16 scale; f16 min; then as q5_0's
//   panel   f16 scale[32]; f16 min[32]; then as q5_0's
//   weight = scale * q + min
#pragma once
#include "q5_0.h"

namespace twofold::kernels::formats {

struct Q5_1 : FiveBits<ScaleAndMin<PerSubblock>, 4> {
  static constexpr const char *kName = "q5_1", *kGguf = "Q5_1";
  static constexpr int kZero = 0;
};

}  // namespace twofold::kernels::formats
