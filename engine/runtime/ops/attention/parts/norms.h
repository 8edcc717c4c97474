// Norm: RMSNorm of queries, keys, values, latents or outputs.
#pragma once
#include "twofold/kernels.h"

namespace twofold {

// weight [n] is not owned; null: there is no norm.
struct Norm {
  const float* weight = nullptr;
  float eps = 0;

  void apply(const kernels::KernelTable& table, const float* from, float* to, int n) const {
    table.rmsnorm(from, weight, eps, to, n);
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
