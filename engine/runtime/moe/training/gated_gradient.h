// Gradients of an expert's activation (kernels/include/twofold/expert.h) with respect to gate and up.
#pragma once
#include <cmath>

#include "twofold/expert.h"

namespace twofold {

struct GatedGradient {
  float gate, up;
};

// A clamp passes the gradient where it changes nothing, at its bounds too, as torch's does.
inline GatedGradient gated_gradient(kernels::ExpertActivation activation, float limit, float gate, float up) {
  using kernels::ExpertActivation;
  const bool limits = limit > 0;
  const float u = limits ? std::fmin(std::fmax(up, -limit), limit) : up;
  const float of_up = limits && (up < -limit || up > limit) ? 0.0f : 1.0f;
  if (activation == ExpertActivation::kSwigluOai) {
    const float g = limits ? std::fmin(gate, limit) : gate;
    const float s = 1.0f / (1.0f + std::exp(-kernels::kSwigluAlpha * g));
    const float slope = s * (1.0f + kernels::kSwigluAlpha * g * (1.0f - s));
    return {limits && gate > limit ? 0.0f : (u + 1.0f) * slope, of_up * g * s};
  }
  if (activation == ExpertActivation::kSiluOfLimited) {
    const float g = limits ? std::fmin(gate, limit) : gate;
    const float s = 1.0f / (1.0f + std::exp(-g));
    return {limits && gate > limit ? 0.0f : u * s * (1.0f + g * (1.0f - s)), of_up * g * s};
  }
  float z = gate, dz = 1.0f;  // the sigmoid's argument and its derivative
  if (activation == ExpertActivation::kGeluTanh) {
    z = gate * (gate * gate * kernels::kGeluCubic + kernels::kGeluLinear);
    dz = 3.0f * gate * gate * kernels::kGeluCubic + kernels::kGeluLinear;
  }
  const float s = 1.0f / (1.0f + std::exp(-z));
  const float value = gate * s;
  const bool is_cut = limits && value > limit;
  return {is_cut ? 0.0f : u * s * (1.0f + gate * dz * (1.0f - s)), of_up * (is_cut ? limit : value)};
}

}  // namespace twofold
