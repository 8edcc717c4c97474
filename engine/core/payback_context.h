// Predicts the next event from the experts just used, beside each expert's own history (policy_payback.cpp).
//
// A token's routing predicts much of the next token's. Every expert used by the event, in its layer or one of
// the few before it, adds its row of learned corrections to the worths of the layer's experts. Rows learn from
// the difference between each transition's worth and the table's belief, one stochastic gradient step per
// event. Corrections are weighted by their past accuracy (a regression of surprises on them): for routing
// without such a pattern they learn noise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace twofold::payback {

constexpr float kContextStep = 0.005F;
constexpr float kTrustMemory = 1 - 1.0F / 3000;  // per event
constexpr float kTrustPrior = 1;
// Own layer and those before it, fewer where layers are wide: the state per layer grows with the square of the
// experts. Beyond kContextExperts there is none: a token's rows would be read from memory, not from a cache.
constexpr size_t kMaxContextLayers = 4;
constexpr size_t kContextExperts = 128;

class Context {
 public:
  Context(size_t num_layers, size_t num_experts, size_t top_k)
      : num_experts_(num_experts),
        span_(std::min(kContextExperts / num_experts, kMaxContextLayers)),
        usual_(top_k * span_),
        learned_(num_layers * span_ * num_experts * num_experts, 0),
        worth_(num_layers * num_experts, 0),
        ahead_(num_experts, 0),
        active_(num_layers),
        rows_(num_layers) {}

  // Corrections of the layer's worths, from its last event.
  const float* worth(size_t layer) const { return worth_.data() + layer * num_experts_; }
  const std::vector<float>& ahead() const { return ahead_; }
  bool can_learn(size_t layer) const { return !rows_[layer].empty(); }

  // Adds an event's experts: their corrections go to ahead() until accept() makes them the layer's.
  void add_event(size_t layer, std::span<const int> active) {
    active_[layer].assign(active.begin(), active.end());
    next_rows_.clear();
    std::fill(ahead_.begin(), ahead_.end(), 0.0F);
    for (size_t back = 0; back < std::min(span_, layer + 1); ++back) {
      for (int expert : active_[layer - back]) {
        const size_t at = (layer * span_ + back) * num_experts_ + static_cast<size_t>(expert);
        next_rows_.push_back(static_cast<uint32_t>(at));
        const float* row = learned_.data() + at * num_experts_;
        float* ahead = ahead_.data();
        for (size_t e = 0; e < num_experts_; ++e) ahead[e] += row[e];
      }
    }
  }

  // Whether layers are narrow enough for it.
  bool exists() const { return span_ > 0; }
  float trust() const { return std::clamp(explained_ / (predicted_ + kTrustPrior), 0.0F, 1.0F); }

  // Worth of each expert's transition beyond the table's belief; the rows of a batch share one step.
  void learn(size_t layer, float* surprise) {
    const float* worth = this->worth(layer);
    float explained = 0, predicted = 0;
    for (size_t e = 0; e < num_experts_; ++e) {
      explained += surprise[e] * worth[e];
      predicted += worth[e] * worth[e];
      surprise[e] -= worth[e];
    }
    explained_ = explained_ * kTrustMemory + explained;
    predicted_ = predicted_ * kTrustMemory + predicted;
    const float rows = static_cast<float>(rows_[layer].size());
    const float step = kContextStep * std::min(1.0F, static_cast<float>(usual_) / rows);
    for (uint32_t at : rows_[layer]) {
      float* row = learned_.data() + at * num_experts_;
      for (size_t e = 0; e < num_experts_; ++e) row[e] += step * surprise[e];
    }
  }

  void accept(size_t layer) {
    std::copy(ahead_.begin(), ahead_.end(),
              worth_.begin() + static_cast<std::ptrdiff_t>(layer * num_experts_));
    rows_[layer].swap(next_rows_);
  }

  // Breaks the chain: the next event of the layer does not follow from the last one.
  void forget(size_t layer) {
    active_[layer].clear();
    rows_[layer].clear();
    std::fill_n(worth_.begin() + static_cast<std::ptrdiff_t>(layer * num_experts_), num_experts_, 0.0F);
  }

  size_t state_size() const { return learned_.size() + 2; }
  void save(std::vector<double>& out) const {
    out.insert(out.end(), learned_.begin(), learned_.end());
    out.insert(out.end(), {static_cast<double>(explained_), static_cast<double>(predicted_)});
  }
  // Loads state_size() values, or none: nothing learned.
  void restore(std::span<const double> state) {
    std::fill(learned_.begin(), learned_.end(), 0.0F);
    explained_ = predicted_ = 0;
    if (!state.empty()) {
      std::transform(state.begin(), state.end() - 2, learned_.begin(),
                     [](double value) { return static_cast<float>(value); });
      explained_ = static_cast<float>(state[state.size() - 2]);
      predicted_ = static_cast<float>(std::max(0.0, state.back()));
    }
    for (size_t layer = 0; layer < rows_.size(); ++layer) forget(layer);
  }

 private:
  size_t num_experts_;
  size_t span_;                          // layers: its own and those before it
  size_t usual_;                         // rows of one token's event
  std::vector<float> learned_;           // [layers, span, experts used, experts]
  float explained_ = 0, predicted_ = 0;  // sums of surprise * correction and correction^2
  std::vector<float> worth_;             // [layers, experts]
  std::vector<float> ahead_;             // [experts]
  std::vector<std::vector<int>> active_;
  std::vector<std::vector<uint32_t>> rows_;  // rows used by each layer's last event
  std::vector<uint32_t> next_rows_;
};

}  // namespace twofold::payback
