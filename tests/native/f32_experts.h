// Experts of f32 weights that lie one after the other: gate, up and down of the first, then of the next.
#pragma once
#include <cstddef>
#include <vector>

#include "moe/expert_store.h"

namespace test {

inline std::vector<twofold::ExpertSource> f32_experts(const std::vector<float>& weights, int num_experts,
                                                      int hidden, int intermediate) {
  std::vector<twofold::ExpertSource> sources;
  for (int e = 0; e < num_experts; ++e) {
    const auto matrix = [&](int which, int rows, int columns) {
      const float* at = weights.data() + size_t((3 * e + which) * hidden * intermediate);
      return twofold::SourceMatrix{twofold::kernels::WeightFormat::kF32,
                                   reinterpret_cast<const std::byte*>(at), rows, columns, 4 * columns};
    };
    sources.push_back(
        {matrix(0, intermediate, hidden), matrix(1, intermediate, hidden), matrix(2, hidden, intermediate)});
  }
  return sources;
}

}  // namespace test
