// Gate: multiplies a head's output by an activation of its gate.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "twofold/kernels.h"

namespace twofold {

struct OutputGate {
  enum class Kind { kNone, kSigmoid, kSoftplus, kSilu };

  Kind kind = Kind::kNone;
  bool by_head = false;  // a head has one gate, else one per element

  explicit operator bool() const { return kind != Kind::kNone; }

  // to[i] = from[i] * activation(gate), n elements; from and to may be the same.
  void apply(const kernels::KernelTable& table, const float* gate, const float* from, float* to,
             int n) const {
    if (kind == Kind::kSilu && !by_head)
      return table.gated_as(kernels::ExpertActivation::kSilu)(gate, from, to, n, 0);
    if (from != to) std::copy_n(from, n, to);
    if (kind == Kind::kSigmoid && !by_head) return table.delta->sigmoid_multiply(gate, to, n);
    const float of_head = by_head ? activated(gate[0]) : 0.0f;
    for (int i = 0; i < n; ++i) to[i] *= by_head ? of_head : activated(gate[i]);
  }

 private:
  float activated(float x) const {
    if (kind == Kind::kSoftplus) return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
    const float sigmoid = 1.0f / (1.0f + std::exp(-x));
    return kind == Kind::kSilu ? x * sigmoid : sigmoid;
  }
};

}  // namespace twofold
