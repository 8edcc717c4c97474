#include "moe/routing_counts.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

void RoutingCounts::start(RoutingDetail detail, int every) {
  if (every < 1)
    throw std::invalid_argument("every " + std::to_string(every) +
                                "-th step was given; 1 or more was expected");
  detail_ = detail;
  every_ = every;
  num_begun_ = 0;
  active_ = false;
  additions_.clear();
  step_ = ended_ = {};
  take();
}

void RoutingCounts::begin_step(const StepRows& rows) {
  recorded_ = rows.is_recorded;
  if (detail_ == RoutingDetail::kOff) return;
  additions_.clear();
  active_ = recorded_ && num_begun_ % every_ == 0;
  step_tokens_ = int(rows.requests.size());
  if (!active_ || detail_ != RoutingDetail::kTokens) return;
  step_.rows = rows;
  step_.top_k = 0;
}

void RoutingCounts::add(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                        std::span<const uint8_t> where) {
  if (!active_) return;
  for (int g = 0; g < groups.size(); ++g) {
    const int expert = groups.experts[size_t(g)];
    const size_t row = size_t(where[size_t(expert)]) * size_t(num_layers_) + size_t(layer);
    additions_.push_back({row * size_t(num_experts_) + size_t(expert), groups.load(g)});
  }
  if (detail_ != RoutingDetail::kTokens) return;
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  if (step_.top_k == 0) {
    step_.top_k = routing.top_k;
    step_.experts.assign(size_t(num_layers_) * num_pairs, 0);
    step_.where.assign(size_t(num_layers_) * num_pairs, 0);
  }
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    const size_t place = size_t(layer) * num_pairs + pair;
    step_.experts[place] = uint16_t(routing.ids[pair]);
    step_.where[place] = where[size_t(routing.ids[pair])];
  }
}

void RoutingCounts::end_step() {
  if (detail_ == RoutingDetail::kOff || !recorded_) return;
  ++num_begun_;
  if (!std::exchange(active_, false)) return;
  for (const Addition& addition : additions_) counts_[addition.place] += addition.load;
  ++num_steps_;
  num_tokens_ += step_tokens_;
  if (detail_ == RoutingDetail::kTokens) ended_ = std::exchange(step_, {});
}

std::vector<int64_t> RoutingCounts::take() {
  const size_t size = size_t(kNumPlacements) * size_t(num_layers_) * size_t(num_experts_);
  num_steps_ = num_tokens_ = 0;
  std::vector<int64_t> fresh(detail_ == RoutingDetail::kOff ? 0 : size, 0);
  std::vector<int64_t> taken = std::exchange(counts_, std::move(fresh));
  taken.resize(size, 0);
  return taken;
}

StepRouting RoutingCounts::take_step() { return std::exchange(ended_, {}); }

}  // namespace twofold
