#include "ops/attention/parts/chosen_positions.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace twofold {

void ChosenPositions::assign(int token, std::span<const int32_t> positions, int list) {
  counts_[at(token, list)] = static_cast<int32_t>(positions.size());
  std::copy(positions.begin(), positions.end(),
            positions_.begin() + static_cast<std::ptrdiff_t>(at(token, list)) * most_);
}

int top_entries(const float* scores, int n, int most, int32_t* out) {
  if (n <= most) {
    std::iota(out, out + n, 0);
    return n;
  }
  const auto ordered = [](float score) {
    return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
  };
  std::vector<float> sorted(static_cast<size_t>(n));
  std::transform(scores, scores + n, sorted.begin(), ordered);
  std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(), std::greater<>());
  const float least = sorted[static_cast<size_t>(most - 1)];
  auto equals =
      most - std::count_if(sorted.begin(), sorted.begin() + most, [&](float score) { return score > least; });
  for (int entry = 0; entry < n; ++entry) {
    const float score = ordered(scores[entry]);
    if (score > least || (score == least && equals-- > 0)) *out++ = entry;
  }
  return most;
}

}  // namespace twofold
