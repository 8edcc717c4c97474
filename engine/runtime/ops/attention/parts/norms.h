// Norm: RMSNorm, or LayerNorm, of queries, keys, values, latents or outputs.
#pragma once
#include "twofold/kernels.h"

namespace twofold {

// weight and bias [n] are not owned; no weight: there is no norm.
struct Norm {
  const float* weight = nullptr;
  float eps = 0;
  const float* bias = nullptr;  // LayerNorm instead of RMSNorm if given

  // `to` may be `from`.
  void apply(const kernels::KernelTable& table, const float* from, float* to, int n) const {
    if (bias == nullptr) return table.rmsnorm(from, weight, eps, to, n);
    float mean = 0;
    for (int i = 0; i < n; ++i) mean += from[i];
    mean /= static_cast<float>(n);
    for (int i = 0; i < n; ++i) to[i] = from[i] - mean;
    table.rmsnorm(to, weight, eps, to, n);
    table.axpy(1.0f, bias, to, n);
  }
  void in_place(const kernels::KernelTable& table, float* x, int n) const {
    if (weight != nullptr) apply(table, x, x, n);
  }
};

// Norms of an attention's heads: each head by itself, or all of its kind together.
struct HeadNorms {
  Norm q;             // [head_dim], or [heads * head_dim] if flat
  Norm k;             // [head_dim], or [kv heads * head_dim] if flat
  Norm v;             // [value_dim]
  bool flat = false;  // q and k are normed over all their heads together
};

}  // namespace twofold
