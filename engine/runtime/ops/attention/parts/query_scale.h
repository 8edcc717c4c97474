// Scale: factors of the rotated queries, by position, head and element.
#pragma once
#include <cmath>
#include <cstdint>

namespace twofold {

// Queries are multiplied by 1 + slope * log1p(floor((position + shift) / period)); period 0: not at all (Llama 4). Or, with
// factors of each head, by slopes[head] * log(position + 1) + bases[head] (Mistral Large 4).
struct QueryScale {
  float period = 0, slope = 0;
  int shift = 1;
  const float* elements = nullptr;                  // [head_dim], not owned; null: none
  const float *slopes = nullptr, *bases = nullptr;  // [heads], not owned; null: none

  float factor(int position, int head) const {
    if (slopes != nullptr) return slopes[head] * std::log(static_cast<float>(position + 1)) + bases[head];
    if (period <= 0) return 1.0f;
    return 1.0f + slope * std::log1p(std::floor(static_cast<float>(position + shift) / period));
  }
  // Multiplies n elements by `factor`, and by the factors of each element.
  void apply(float factor, float* q, int64_t n) const {
    if (factor == 1.0f && elements == nullptr) return;
    for (int64_t i = 0; i < n; ++i) q[i] *= elements == nullptr ? factor : factor * elements[i];
  }
};

}  // namespace twofold
