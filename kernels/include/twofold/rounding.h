// Rounding between the two products of an expert, h = gated(gate x, up x) (expert.h); defined here only.
// docs/design.md ("Outputs never depend on placement") describes the consequences for users.
//
//   weights    CPU to avx512_vnni    CPU, avx512_bf16, amx    device, few    device, many
//   f32        f32                   f32                      f32            f32
//   f16        f32                   f32                      f32            bf16 *
//   bf16       f32                   bf16                     bf16           bf16
//   fp8        f32                   f32                      bf16           bf16 *
//   integers   q8                    q8                       q8             bf16 *
//   channels   q8_token              q8_token                 q8             bf16 *
//
// "few": up to 32 tokens of a layer (decode kernels), "many": more (tensor cores). *: the weights are rounded
// to bf16 as well. A CPU that shares experts with a device rounds as the device's decode kernels do
// (Rounding::kOfDevice), whatever its level, and multiplies integers with one scale for a row as those with one
// for a block; alone, also with an emulated accelerator, each level has its own
// rounding. Where both sides round alike, an expert's result differs by the order of float32 sums; where not,
// output n by at most the sum over i of |w_down[n, i]| * d_i besides, d_i being the sum over the roundings
// that one side makes and the other does not: |h_i| * 2^-8 for bf16 (8 bits of significand, to nearest),
// amax / 254 for q8 (half a step; amax of its subblock of 32) and q8_token (of the row).
#pragma once
#include "twofold/packed_kernels.h"

namespace twofold::kernels {

enum class Rounding : uint8_t { kOfLevel, kOfDevice };

// What a device's decode kernels multiply weights of a format with.
TWOFOLD_HD constexpr ActivationKind device_activation(WeightFormat format) {
  return with_format(format, []<class Format>(Format) {
    if constexpr (is_integer<Format>) {
      return ActivationKind::kQ8;
    } else {
      return Format::kDeviceActivation;
    }
  });
}

// The level whose kernels multiply a format's panels on the CPU.
constexpr WeightFormat multiplied_as(WeightFormat format, Rounding rounding) {
  return with_format(format, [=]<class Format>(Format) {
    if constexpr (is_per_channel<Format>) {
      if (rounding == Rounding::kOfDevice) return kNumberOf<typename Format::InBlocks>;
    }
    return kNumberOf<Format>;
  });
}

// Type to which the CPU rounds h, for an expert whose down matrix has this format and whose kernel takes `of_level`.
constexpr ActivationKind inner_activation(ActivationKind of_level, WeightFormat down, Rounding rounding) {
  const bool differs = of_level == ActivationKind::kF32 || of_level == ActivationKind::kQ8Token;
  return differs && rounding == Rounding::kOfDevice ? device_activation(down) : of_level;
}

}  // namespace twofold::kernels
