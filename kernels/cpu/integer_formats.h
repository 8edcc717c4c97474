// How a panel of an integer format (weight_format.h) is read: 32-column runs of unsigned bytes and their
// scales, for integer_products.h. Written over a vector type V; see there.
#pragma once
#include <cstdint>

#include "twofold/weight_format.h"

namespace twofold::kernels {
namespace {

// Where the scales of a run belong in the sum.
enum class ScaleOf : uint8_t {
  kRun,    // every run has its own: sum += (f * scale) * x_scale
  kBlock,  // a panel block shares one: it multiplies the sum of the block's f * x_scale
  kHalf,   // every 16 columns have their own
};

template <WeightFormat kOf>
struct PanelFormat {
  static constexpr WeightFormat kFormat = kOf;
  static constexpr FormatLayout kLayout = layout_of(kFormat);
  static constexpr int kBlockBytes = kLayout.panel_block_bytes;
  static constexpr int kRuns = kLayout.panel_columns / 32;  // of a panel block
  static constexpr int kUnpackTiles = 0;  // tiles of activations for which to unpack a part; 0: never
};

struct Q8_0 : PanelFormat<WeightFormat::kQ8_0> {
  static constexpr ScaleOf kScale = ScaleOf::kRun;
  static constexpr int kZero = 128, kBits = 8;
  static constexpr bool kMin = false;

  template <class V>
  static typename V::I bytes(const uint8_t* block, int, int, int step, int g) {
    return V::load(block + 64 + 128 * step + V::kBytes * g);
  }
  template <class V>
  static typename V::F scale(const uint8_t* block, int, int g) {
    return V::half(block + 2 * V::kLanes * g);
  }
};

struct Q4_0 : PanelFormat<WeightFormat::kQ4_0> {
  static constexpr ScaleOf kScale = ScaleOf::kRun;
  static constexpr int kZero = 8, kBits = 4;
  static constexpr bool kMin = false;

  template <class V>
  static typename V::I bytes(const uint8_t* block, int, int, int step, int g) {
    const typename V::I both = V::load(block + 64 + 128 * (step % 4) + V::kBytes * g);
    return step < 4 ? V::low_nibbles(both) : V::high_nibbles(both);
  }
  template <class V>
  static typename V::F scale(const uint8_t* block, int, int g) {
    return V::half(block + 2 * V::kLanes * g);
  }
};

struct Int8 : PanelFormat<WeightFormat::kInt8> {
  static constexpr ScaleOf kScale = ScaleOf::kBlock;
  static constexpr int kZero = 128, kBits = 8;
  static constexpr bool kMin = false;

  template <class V>
  static typename V::I bytes(const uint8_t* block, int pair, int odd, int step, int g) {
    return V::load(block + 64 + 1024 * (2 * pair + odd) + 128 * step + V::kBytes * g);
  }
  template <class V>
  static typename V::F scale(const uint8_t* block, int, int g) {
    return V::half(block + 2 * V::kLanes * g);
  }
};

struct Int4 : PanelFormat<WeightFormat::kInt4> {
  static constexpr ScaleOf kScale = ScaleOf::kBlock;
  static constexpr int kZero = 0, kBits = 4;
  static constexpr bool kMin = true;

  template <class V>
  static typename V::I bytes(const uint8_t* block, int, int odd, int step, int g) {
    const typename V::I both = V::load(block + 128 + 128 * step + V::kBytes * g);
    return odd == 0 ? V::low_nibbles(both) : V::high_nibbles(both);
  }
  template <class V>
  static typename V::F scale(const uint8_t* block, int, int g) {
    return V::half(block + 2 * V::kLanes * g);
  }
  template <class V>
  static typename V::F min(const uint8_t* block, int, int g) {
    return V::half(block + 64 + 2 * V::kLanes * g);
  }
};

// The K-quants: d and dmin of the block, 6-bit scales and mins of the runs, then pairs of runs.
template <WeightFormat kOf, int kPairBytes>
struct KQuant : PanelFormat<kOf> {
  static constexpr ScaleOf kScale = ScaleOf::kRun;
  static constexpr int kZero = 0;
  static constexpr bool kMin = true;

  static const uint8_t* weights(const uint8_t* block, int pair) { return block + 640 + pair * kPairBytes; }
  template <class V>
  static typename V::F scale(const uint8_t* block, int run, int g) {
    return V::mul(V::half(block + 2 * V::kLanes * g),
                  V::unsigned_bytes(block + 128 + 32 * run + V::kLanes * g));
  }
  // Subtracted, so negative.
  template <class V>
  static typename V::F min(const uint8_t* block, int run, int g) {
    return V::negative(V::mul(V::half(block + 64 + 2 * V::kLanes * g),
                              V::unsigned_bytes(block + 384 + 32 * run + V::kLanes * g)));
  }
};

struct Q4_K : KQuant<WeightFormat::kQ4_K, 1024> {
  static constexpr int kBits = 4;

  template <class V>
  static typename V::I bytes(const uint8_t* block, int pair, int odd, int step, int g) {
    const typename V::I both = V::load(weights(block, pair) + 128 * step + V::kBytes * g);
    return odd == 0 ? V::low_nibbles(both) : V::high_nibbles(both);
  }
};

struct Q5_K : KQuant<WeightFormat::kQ5_K, 1280> {
  static constexpr int kBits = 8, kUnpackTiles = 3;

  template <class V>
  static typename V::I bytes(const uint8_t* block, int pair, int odd, int step, int g) {
    const uint8_t* planes = weights(block, pair) + 16 * step + V::kBytes / 8 * g;
    const typename V::I both = V::load(weights(block, pair) + 256 + 128 * step + V::kBytes * g);
    return V::template with_bit<16>(odd == 0 ? V::low_nibbles(both) : V::high_nibbles(both),
                                    planes + odd * 128);
  }
};

struct Q6_K : PanelFormat<WeightFormat::kQ6_K> {
  static constexpr ScaleOf kScale = ScaleOf::kHalf;
  static constexpr int kZero = 32, kBits = 8, kUnpackTiles = 3;
  static constexpr bool kMin = false;

  static const uint8_t* weights(const uint8_t* block, int pair) { return block + 576 + pair * 1536; }
  template <class V>
  static typename V::I bytes(const uint8_t* block, int pair, int odd, int step, int g) {
    const uint8_t* planes = weights(block, pair) + 16 * step + V::kBytes / 8 * g;
    const typename V::I both = V::load(weights(block, pair) + 512 + 128 * step + V::kBytes * g);
    const typename V::I five =
        V::template with_bit<16>(odd == 0 ? V::low_nibbles(both) : V::high_nibbles(both), planes + odd * 128);
    return V::template with_bit<32>(five, planes + 256 + odd * 128);
  }
  // Of the first (half 0) or last 16 columns of a run.
  template <class V>
  static typename V::F half_scale(const uint8_t* block, int run, int half, int g) {
    return V::mul(V::half(block + 2 * V::kLanes * g),
                  V::signed_bytes(block + 64 + 32 * (2 * run + half) + V::kLanes * g));
  }
};

// A panel block of a K-quant unpacked into the first-level cache: what many tiles of activations are worth.
template <class Format>
struct Unpacked {
  static constexpr int kRuns = Format::kRuns;
  static constexpr bool kHalves = Format::kScale == ScaleOf::kHalf;
  static constexpr int kScales = kHalves ? 2 * kRuns : kRuns;
  static constexpr int kScalesAt = 1024 * kRuns, kMinsAt = kScalesAt + 128 * kScales;
  static constexpr int kBlockBytes = kMinsAt + (Format::kMin ? 128 * kRuns : 0);

  template <class V>
  static void unpack(const uint8_t* block, uint8_t* to) {
    float* scales = reinterpret_cast<float*>(to + kScalesAt);
    float* mins = reinterpret_cast<float*>(to + kMinsAt);
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
