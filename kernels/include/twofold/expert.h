// Expert properties other than its three matrices: the activation of gate and up, and the biases.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "host_device.h"

namespace twofold::kernels {

// A limit above 0 clamps up to both sides of it, and the gate from above: before its activation where a line says so, else
// after it.
enum class ExpertActivation : uint8_t {
  kSilu,           // silu(gate) * up
  kSwigluOai,      // gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), limited before
  kGeluTanh,       // gelu(gate) * up, its form with tanh
  kSiluOfLimited,  // silu(gate) * up, limited before
};
inline constexpr int kNumExpertActivations = 4;
inline constexpr float kSwigluAlpha = 1.702f;
// gelu(v) = v / 2 * (1 + tanh(z)) = v / (1 + exp(-2 z)), 2 z = v * (kGeluLinear + kGeluCubic * v^2).
inline constexpr float kGeluLinear = 1.5957691216f, kGeluCubic = 0.0713548163f;

// A NaN passes. limit: 0 for none. exp: of one float.
template <class Exp>
TWOFOLD_HD float gated(ExpertActivation activation, float limit, float gate, float up, const Exp& exp) {
  const auto at_most = [limit](float v) { return limit > 0 && v > limit ? limit : v; };
  const float u = limit > 0 && up < -limit ? -limit : at_most(up);
  switch (activation) {
    case ExpertActivation::kSwigluOai: {
      const float g = at_most(gate);
      return (u + 1.0f) * (g / (1.0f + exp(-(g * kSwigluAlpha))));
    }
    case ExpertActivation::kGeluTanh:
      return at_most(gate / (1.0f + exp(-(gate * (gate * gate * kGeluCubic + kGeluLinear))))) * u;
    case ExpertActivation::kSiluOfLimited: {
      const float g = at_most(gate);
      return g / (1.0f + exp(-g)) * u;
    }
    default:
      return at_most(gate / (1.0f + exp(-gate))) * u;
  }
}

// Biases follow an expert's panels as float32: gate, up, down, each aligned to a cache line. Offsets are in floats.
constexpr int64_t bias_floats(int64_t rows) { return (rows + 15) / 16 * 16; }
TWOFOLD_HD constexpr int64_t up_bias_at(int64_t intermediate) { return (intermediate + 15) / 16 * 16; }
TWOFOLD_HD constexpr int64_t down_bias_at(int64_t intermediate) { return 2 * up_bias_at(intermediate); }
constexpr int64_t expert_bias_bytes(int64_t hidden, int64_t intermediate) {
  return 4 * (2 * bias_floats(intermediate) + bias_floats(hidden));
}

inline constexpr const char* kExpertActivationNames[kNumExpertActivations] = {"silu", "swiglu_oai",
                                                                              "gelu_tanh", "silu_of_limited"};
// Throws std::invalid_argument for a name that is none of these.
inline ExpertActivation expert_activation_named(const std::string& name) {
  for (int i = 0; i < kNumExpertActivations; ++i) {
    if (name == kExpertActivationNames[i]) return static_cast<ExpertActivation>(i);
  }
  throw std::invalid_argument("activation of experts is \"" + name +
                              "\"; expected silu, swiglu_oai, gelu_tanh or silu_of_limited");
}

}  // namespace twofold::kernels
