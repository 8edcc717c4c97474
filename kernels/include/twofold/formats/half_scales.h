// What GGUF's Q3_K and Q6_K share: 256 columns, a signed integer for each run of 16, times an f16.
#pragma once
#include "panel.h"

namespace twofold::kernels::formats {

// panel   f16 d[32]; i8 scale[16][32] (of runs of 16)
// Source: kScaleAt, of the block's f16; source_sub(block, half_run), the integers.
template <class Source>
struct HalfScales : Source {
  static constexpr int kHeaderBytes = 576;
  static constexpr bool kMin = false;

  static float source_half_scale(const uint8_t* block, int run, int half) {
    return f16_at(block + Source::kScaleAt) * static_cast<float>(Source::source_sub(block, 2 * run + half));
  }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    std::memcpy(panel + 2 * row, block + Source::kScaleAt, 2);
    for (int half_run = 0; half_run < 16; ++half_run) {
      panel[64 + 32 * half_run + row] = static_cast<uint8_t>(Source::source_sub(block, half_run));
    }
  }
  static constexpr SubScale kSub = SubScale::kSigned;
  TWOFOLD_HD static constexpr int sub_at(int run, int half) { return 64 + 32 * (2 * run + half); }
  template <class V>
  TWOFOLD_HD static typename V::F block_scale(const uint8_t* panel, int g) {
    return V::half(panel + 2 * V::kLanes * g);
  }
  // Scales of the first (half 0) or last 16 columns of a run.
  template <class V>
  TWOFOLD_HD static typename V::F half_scale(const uint8_t* panel, int run, int half, int g) {
    return V::mul(block_scale<V>(panel, g), V::signed_bytes(panel + sub_at(run, half) + V::kLanes * g));
  }
};

}  // namespace twofold::kernels::formats
