// Positions chosen one by one for each token of a batch: an ascending list per token, or one per group of its heads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace twofold {

// Writes the numbers of the `most` largest of scores [n], ascending, the lower number first among equals; NaN counts as
// -infinity. All of them if they are at most `most`. Returns how many.
int top_entries(const float* scores, int n, int most, int32_t* out);

// Lists of different tokens may be written by different threads.
class ChosenPositions {
 public:
  // Empty lists for so many tokens, `lists` of each, of at most `most` positions.
  void start(int num_tokens, int most, int lists = 1) {
    most_ = most;
    lists_ = lists;
    counts_.assign(static_cast<size_t>(num_tokens) * static_cast<size_t>(lists), 0);
    positions_.resize(counts_.size() * static_cast<size_t>(most));
  }
  int num_tokens() const { return static_cast<int>(counts_.size()) / lists_; }
  int num_lists() const { return lists_; }
  int most() const { return most_; }

  // Chooses ascending positions, at most `most`.
  void assign(int token, std::span<const int32_t> positions, int list = 0);
  // Chooses the positions with the largest of scores [n], as top_entries does. So the list depends on the scores alone.
  void keep_top(int token, const float* scores, int n) {
    counts_[at(token, 0)] = top_entries(scores, n, most_, positions_.data() + at(token, 0) * size_t(most_));
  }

  // The list of heads of key head `part`; all of them have the only one.
  std::span<const int32_t> of(int token, int part = 0) const {
    const size_t t = at(token, lists_ == 1 ? 0 : part);
    return {positions_.data() + t * static_cast<size_t>(most_), static_cast<size_t>(counts_[t])};
  }

 private:
  size_t at(int token, int list) const {
    return static_cast<size_t>(token) * static_cast<size_t>(lists_) + static_cast<size_t>(list);
  }

  int most_ = 0, lists_ = 1;
  std::vector<int32_t> positions_;  // [tokens, lists, most]
  std::vector<int32_t> counts_;     // [tokens, lists]
};

}  // namespace twofold
