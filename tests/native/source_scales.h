// Writing the f16 numbers of a source block, for tests that make blocks of random bytes.
#pragma once
#include <cstdint>

#include "twofold/weight_format.h"

namespace test {

// Calls use(which, number of the nibble within the block) for each nibble of the block's scale (0) and minimum (1), lowest
// first.
template <class Format, class Use>
void for_each_scale_nibble(Use use) {
  using namespace twofold::kernels;
  const auto together = [&](int which, int at) {
    for (int i = 0; i < 4; ++i) use(which, 2 * at + i);
  };
  if constexpr (requires { Format::kScaleNibblesAt; }) {
    for (int i = 0; i < 4; ++i) use(0, 2 * (Format::kScaleNibblesAt + 2 * i) + 1);
  } else if constexpr (is_integer<Format> && !is_per_channel<Format> && requires { Format::kScaleAt; }) {
    together(0, Format::kScaleAt);
    if constexpr (Format::kMin) together(1, Format::kMinAt);
  }
}

// Writes a block's f16 scale and, of formats that have one, its minimum.
template <class Format>
void put_scales(uint8_t* block, uint16_t scale, uint16_t min) {
  uint32_t left[2] = {scale, min};
  for_each_scale_nibble<Format>([&](int which, int nibble) {
    const int shift = nibble % 2 * 4;
    uint8_t& byte = block[nibble / 2];
    byte = static_cast<uint8_t>((byte & ~(15u << shift)) | (left[which] & 15u) << shift);
    left[which] >>= 4;
  });
}

}  // namespace test
