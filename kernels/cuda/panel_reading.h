// How a panel is cut among lanes and read: units of K, 16 bytes of four rows, scales, encoded activations.
//
// Eight lanes read a step together: lane `quad` takes rows 4 quad ... 4 quad + 3, 16 bytes. K is cut into
// units; which lane takes which unit is launch_shapes.h's.
#pragma once
#include <cstdint>
#include <cstring>

#include "launch_shapes.h"
#include "number_formats.h"
#include "twofold/packed_kernels.h"
#include "twofold/weight_format.h"

namespace twofold::cuda {

inline constexpr int kRowsOfLane = 4;
inline constexpr int kStepBytes = 128;
inline constexpr int kStepsOfUnit = 8;  // of plain formats

TWOFOLD_HD constexpr bool is_plain(WeightFormat format) {
  return format == WeightFormat::kF32 || format == WeightFormat::kF16 || format == WeightFormat::kBF16;
}

// Columns that a unit covers.
TWOFOLD_HD constexpr int unit_columns(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return kStepsOfUnit;
    case WeightFormat::kF16:
    case WeightFormat::kBF16:
      return 2 * kStepsOfUnit;
    case WeightFormat::kFP8:
    case WeightFormat::kInt8:
    case WeightFormat::kQ8_0:
    case WeightFormat::kQ4_0:
      return 32;
    default:  // a pair of runs
      return 64;
  }
}

// Units of a panel block; a plain format's unit is several blocks instead.
TWOFOLD_HD constexpr int units_of_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFP8:
    case WeightFormat::kInt8:
    case WeightFormat::kQ4_K:
    case WeightFormat::kQ5_K:
    case WeightFormat::kQ6_K:
      return 4;
    default:
      return 1;
  }
}

// Units of a row of K weights: those of whole panel blocks, since their missing columns are zeros.
TWOFOLD_HD constexpr int num_units(WeightFormat format, int K) {
  const int block = is_plain(format) ? 1 : unit_columns(format) * units_of_block(format);
  const int columns = (K + block - 1) / block * block;
  return (columns + unit_columns(format) - 1) / unit_columns(format);
}

struct Words {
  uint32_t w[4];
};

// 16 bytes of weights, read once: they need not stay in L1.
TWOFOLD_HD Words load_words(const uint8_t* p) {
  Words words;
#ifdef __CUDA_ARCH__
  const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
  words.w[0] = v.x;
  words.w[1] = v.y;
  words.w[2] = v.z;
  words.w[3] = v.w;
#else
  std::memcpy(words.w, p, 16);
#endif
  return words;
}

// Consecutive steps, all asked for before the first is used.
template <int kSteps>
TWOFOLD_HD void load_steps(const uint8_t* first, Words (&out)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) out[s] = load_words(first + s * kStepBytes);
}

template <typename T>
TWOFOLD_HD T load(const void* p) {
#ifdef __CUDA_ARCH__
  return *static_cast<const T*>(p);
#else
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
#endif
}

// Four f16 of rows 4 quad ...
TWOFOLD_HD void load_scales(const uint8_t* scales, int quad, float (&out)[kRowsOfLane]) {
  const uint32_t low = load<uint32_t>(scales + 8 * quad);
  const uint32_t high = load<uint32_t>(scales + 8 * quad + 4);
  out[0] = f16_to_float(low & 0xffffu);
  out[1] = f16_to_float(low >> 16);
  out[2] = f16_to_float(high & 0xffffu);
  out[3] = f16_to_float(high >> 16);
}

// An encoded q8 row: i8 q[P], f32 scale[P / 32], i32 sum16[P / 16].
struct Q8Row {
  const uint8_t* row;
  int P;

  TWOFOLD_HD uint32_t word(int column) const { return load<uint32_t>(row + column); }
  TWOFOLD_HD float scale(int column) const { return load<float>(row + P + column / 32 * 4); }
  TWOFOLD_HD int32_t sum16(int column) const { return load<int32_t>(row + P + P / 8 + column / 16 * 4); }
  TWOFOLD_HD int32_t sum32(int column) const { return sum16(column) + sum16(column + 16); }
};

}  // namespace twofold::cuda
