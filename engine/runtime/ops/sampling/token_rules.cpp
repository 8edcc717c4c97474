#include "ops/sampling/token_rules.h"

#include <algorithm>
#include <limits>

namespace twofold {

TokenRules::TokenRules(TokenRuleSettings settings, std::span<const int32_t> prompt)
    : settings_(std::move(settings)),
      penalises_(settings_.presence_penalty != 0.0f || settings_.frequency_penalty != 0.0f ||
                 settings_.repetition_penalty != 1.0f) {
  for (const std::vector<int32_t>& word : settings_.bad_words)
    longest_prefix_ = std::max(longest_prefix_, word.empty() ? 0 : word.size() - 1);
  const size_t kept = std::min(longest_prefix_, prompt.size());
  tail_.assign(prompt.end() - static_cast<std::ptrdiff_t>(kept), prompt.end());
  if (settings_.repetition_penalty != 1.0f) {
    for (const int32_t token : prompt) note(token, 0);
  }
}

void TokenRules::note(int32_t token, int times) {
  const auto [at, is_new] = place_.try_emplace(token, seen_.size());
  if (is_new) {
    seen_.push_back(token);
    counts_.push_back(0);
  }
  counts_[at->second] += times;
}

void TokenRules::take(int32_t token) {
  ++num_taken_;
  if (penalises_) note(token, 1);
  if (longest_prefix_ == 0) return;
  if (tail_.size() == longest_prefix_) tail_.erase(tail_.begin());
  tail_.push_back(token);
}

void TokenRules::apply(std::span<float> logits, Changes& changes) const {
  constexpr float kImpossible = -std::numeric_limits<float>::infinity();
  const auto set = [&](int32_t token, auto&& changed) {
    if (token < 0 || static_cast<size_t>(token) >= logits.size()) return;
    float& logit = logits[static_cast<size_t>(token)];
    changes.emplace_back(token, logit);
    logit = changed(logit);
  };
  for (const std::vector<int32_t>& word : settings_.bad_words) {
    if (word.empty() || word.size() - 1 > tail_.size()) continue;
    const auto prefix = static_cast<std::ptrdiff_t>(word.size() - 1);
    if (std::equal(word.begin(), word.begin() + prefix, tail_.end() - prefix))
      set(word.back(), [](float) { return kImpossible; });
  }
  if (num_taken_ < settings_.min_tokens) {
    for (const int32_t token : settings_.withheld) set(token, [](float) { return kImpossible; });
  }
  for (const auto& [token, bias] : settings_.bias) set(token, [bias = bias](float v) { return v + bias; });
  if (!penalises_) return;
  const float repetition = settings_.repetition_penalty;
  for (size_t i = 0; i < seen_.size(); ++i) {
    set(seen_[i], [&](float v) {
      if (repetition != 1.0f) v = v > 0.0f ? v / repetition : v * repetition;
      if (counts_[i] == 0) return v;
      return v - (settings_.frequency_penalty * static_cast<float>(counts_[i]) + settings_.presence_penalty);
    });
  }
}

void TokenRules::undo(std::span<float> logits, Changes& changes) {
  for (auto change = changes.rbegin(); change != changes.rend(); ++change)
    logits[static_cast<size_t>(change->first)] = change->second;
  changes.clear();
}

}  // namespace twofold
