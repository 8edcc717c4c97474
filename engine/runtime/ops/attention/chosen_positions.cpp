#include "ops/attention/parts/chosen_positions.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace twofold {

void ChosenPositions::assign(int token, std::span<const int32_t> positions) {
  counts_[static_cast<size_t>(token)] = static_cast<int32_t>(positions.size());
  std::copy(positions.begin(), positions.end(),
            positions_.begin() + static_cast<std::ptrdiff_t>(token) * most_);
}

void ChosenPositions::keep_top(int token, const float* scores, int n) {
  int32_t* out = positions_.data() + static_cast<size_t>(token) * static_cast<size_t>(most_);
  counts_[static_cast<size_t>(token)] = std::min(n, most_);
  if (n <= most_) return std::iota(out, out + n, 0);
  const auto ordered = [](float score) {
    return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
  };
  std::vector<float> sorted(static_cast<size_t>(n));
  std::transform(scores, scores + n, sorted.begin(), ordered);
  std::nth_element(sorted.begin(), sorted.begin() + most_ - 1, sorted.end(), std::greater<>());
  const float least = sorted[static_cast<size_t>(most_ - 1)];
  auto equals = most_ - std::count_if(sorted.begin(), sorted.begin() + most_,
                                      [&](float score) { return score > least; });
  for (int position = 0; position < n; ++position) {
    const float score = ordered(scores[position]);
    if (score > least || (score == least && equals-- > 0)) *out++ = position;
  }
}

}  // namespace twofold
