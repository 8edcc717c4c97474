// Positions chosen one by one for each token of a batch: an ascending list per token.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace twofold {

// Lists of different tokens may be written by different threads.
class ChosenPositions {
 public:
  // Empty lists for so many tokens, of at most `most` positions each.
  void start(int num_tokens, int most) {
    most_ = most;
    counts_.assign(static_cast<size_t>(num_tokens), 0);
    positions_.resize(static_cast<size_t>(num_tokens) * static_cast<size_t>(most));
  }
  int num_tokens() const { return static_cast<int>(counts_.size()); }

  // Chooses ascending positions, at most `most`.
  void assign(int token, std::span<const int32_t> positions);
  // Chooses the positions with the largest of scores [n], the lower position first among equals; NaN counts as -infinity.
  // All n positions if they are at most `most`. So the list depends on the scores alone.
  void keep_top(int token, const float* scores, int n);

  std::span<const int32_t> of(int token) const {
    const size_t t = static_cast<size_t>(token);
    return {positions_.data() + t * static_cast<size_t>(most_), static_cast<size_t>(counts_[t])};
  }

 private:
  int most_ = 0;
  std::vector<int32_t> positions_;  // [tokens, most]
  std::vector<int32_t> counts_;     // [tokens]
};

}  // namespace twofold
