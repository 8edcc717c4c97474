// A panel block of an integer format unpacked into the first-level cache: what many tiles of activations are
// worth where bits lie in planes. To integer_products.h it is another format.
#pragma once
#include <cstdint>

#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

template <class Format>
struct Unpacked {
  static constexpr int kRuns = Format::kRuns;
  static constexpr bool kHalves = Format::kScale == ScaleOf::kHalf;
  static constexpr int kScales = kHalves ? 2 * kRuns : kRuns;
  static constexpr int kScalesAt = 1024 * kRuns, kMinsAt = kScalesAt + 128 * kScales;
  static constexpr int kPanelBytes = kMinsAt + (Format::kMin ? 128 * kRuns : 0);

  template <class V>
  static void unpack(const uint8_t* block, uint8_t* to) {
    float* scales = reinterpret_cast<float*>(to + kScalesAt);
    [[maybe_unused]] float* mins = reinterpret_cast<float*>(to + kMinsAt);
    for (int pair = 0; 2 * pair < kRuns; ++pair) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const int run = 2 * pair + odd;
#pragma GCC unroll 4
        for (int g = 0; g < kPanelRows / V::kLanes; ++g) {
#pragma GCC unroll 8
          for (int step = 0; step < 8; ++step) {
            V::store(to + 1024 * run + 128 * step + V::kBytes * g,
                     Format::template bytes<V>(block, pair, odd, step, g));
          }
          const int column = V::kLanes * g;
          if constexpr (kHalves) {
            V::store(scales + 64 * run + column, Format::template half_scale<V>(block, run, 0, g));
            V::store(scales + 64 * run + 32 + column, Format::template half_scale<V>(block, run, 1, g));
          } else {
            V::store(scales + 32 * run + column, Format::template scale<V>(block, run, g));
            if constexpr (Format::kMin)
              V::store(mins + 32 * run + column, Format::template min<V>(block, run, g));
          }
        }
      }
    }
  }

  template <class V>
  static typename V::I bytes(const uint8_t* block, int pair, int odd, int step, int g) {
    return V::load(block + 1024 * (2 * pair + odd) + 128 * step + V::kBytes * g);
  }
  template <class V>
  static typename V::F scale(const uint8_t* block, int run, int g) {
    return V::load(reinterpret_cast<const float*>(block + kScalesAt) + 32 * run + V::kLanes * g);
  }
  template <class V>
  static typename V::F half_scale(const uint8_t* block, int run, int half, int g) {
    return V::load(reinterpret_cast<const float*>(block + kScalesAt) + 64 * run + 32 * half + V::kLanes * g);
  }
  template <class V>
  static typename V::F min(const uint8_t* block, int run, int g) {
    return V::load(reinterpret_cast<const float*>(block + kMinsAt) + 32 * run + V::kLanes * g);
  }
};

}  // namespace
}  // namespace twofold::kernels
