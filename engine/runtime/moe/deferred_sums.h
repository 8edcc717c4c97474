// The output of a layer's deferred experts, kept until the next MoE layer's output joins the residual.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "moe/expert_compute.h"

namespace twofold {

class DeferredSums {
 public:
  void clear() { any_ = false; }
  bool any() const { return any_; }

  // Allocates room for a layer's deferred output, zeros [num_tokens, hidden]; groups names its pairs.
  float* begin(int num_tokens, int hidden, const ExpertGroups& groups, int top_k) {
    sums_.assign(static_cast<size_t>(num_tokens) * static_cast<size_t>(hidden), 0.0f);
    rows_.assign(static_cast<size_t>(num_tokens), 0);
    for (const int pair : groups.pairs) rows_[static_cast<size_t>(pair / top_k)] = 1;
    any_ = true;
    return sums_.data();
  }

  // rows[t] += the sum kept for t, then clears all sums. Rows without a sum stay bit-identical.
  void join(float* rows, int hidden) {
    if (!any_) return;
    const size_t width = static_cast<size_t>(hidden);
    for (size_t t = 0; t < rows_.size(); ++t) {
      if (!rows_[t]) continue;
      const float* from = sums_.data() + t * width;
      std::transform(from, from + width, rows + t * width, rows + t * width,
                     [](float kept, float row) { return row + kept; });
    }
    any_ = false;
  }

 private:
  std::vector<float> sums_;
  std::vector<uint8_t> rows_;
  bool any_ = false;
};

}  // namespace twofold
