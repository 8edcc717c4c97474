// Who rounds what between the two products of an expert, h = silu(gate x) * up x: the one place that says it.
// docs/design.md ("Outputs never depend on placement") says what follows for users.
//
//   weights    CPU to avx512_vnni    CPU, avx512_bf16, amx    device, few    device, many
//   f32        f32                   f32                      f32            f32
//   f16        f32                   f32                      f32            bf16 *
//   bf16       f32                   bf16                     bf16           bf16
//   fp8        f32                   f32                      bf16           bf16 *
//   integers   q8                    q8                       q8             bf16 *
//
// "few": up to 32 tokens of a layer (decode kernels), "many": more (tensor cores). *: the weights are rounded
// to bf16 as well. A CPU that shares experts with a device rounds as the device's decode kernels do
// (Rounding::kOfDevice), whatever its level; alone, also beside an emulated accelerator, each level rounds as
// it likes. Where both sides round alike, an expert's result differs by the order of float32 sums; where not,
// output n by at most the sum over i of |w_down[n, i]| * d_i besides, d_i being the sum over the roundings
// that one side makes and the other does not: |h_i| * 2^-8 for bf16 (8 bits of significand, to nearest),
// amax / 254 for q8 (half a step; amax of its run of 32).
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

// What the CPU rounds h to, of an expert whose down matrix has this format and whose kernel takes `of_level`.
constexpr ActivationKind inner_activation(ActivationKind of_level, WeightFormat down, Rounding rounding) {
  const bool coarser = of_level == ActivationKind::kF32 && rounding == Rounding::kOfDevice;
  return coarser ? device_activation(down) : of_level;
}

}  // namespace twofold::kernels
