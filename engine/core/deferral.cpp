#include "twofold/deferral.h"

#include <algorithm>

namespace twofold {

namespace {
constexpr int kImmediate = 2;
}

std::span<const uint8_t> Deferral::choose(int layer, std::span<const float> weights, int top_k,
                                          std::span<const uint8_t> generated,
                                          std::span<const uint8_t> on_cpu) {
  const int most = std::min(most_, top_k - kImmediate);
  if (most < 1 || layer + 1 >= num_layers_ || generated.empty()) return {};
  deferred_.assign(on_cpu.size(), 0);
  bool any = false;
  for (size_t row = 0; row < generated.size(); ++row) {
    if (!generated[row]) continue;
    const size_t first = row * static_cast<size_t>(top_k);
    ranks_.clear();
    for (int k = top_k - 1; k >= 0; --k) ranks_.push_back(k);
    if (!weights.empty()) {
      std::stable_sort(ranks_.begin(), ranks_.end(), [&](int a, int b) {
        return weights[first + static_cast<size_t>(a)] < weights[first + static_cast<size_t>(b)];
      });
    }
    for (int n = 0; n < most; ++n) {
      const size_t pair = first + static_cast<size_t>(ranks_[static_cast<size_t>(n)]);
      deferred_[pair] = on_cpu[pair];
      any = any || on_cpu[pair] != 0;
    }
  }
  return any ? std::span<const uint8_t>(deferred_) : std::span<const uint8_t>();
}

}  // namespace twofold
