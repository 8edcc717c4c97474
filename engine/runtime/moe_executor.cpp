#include "moe_executor.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "work_clock.h"

namespace twofold {

MoeExecutor::MoeExecutor(ThreadTeam& team, const ExpertStore& store, std::optional<CostModel> cost)
    : store_(store),
      accelerator_(std::make_unique<NoAccelerator>(store, std::move(cost))),
      compute_(team, store.shape()),
      where_of_expert_(size_t(store.num_experts())) {}

MoeExecutor::MoeExecutor(ThreadTeam& team, const ExpertStore& store,
                         std::shared_ptr<SlottedAccelerator> accelerator, bool preload)
    : store_(store), compute_(team, store.shape()), where_of_expert_(size_t(store.num_experts())) {
  accelerator->record_to(events_);
  if (preload) accelerator->preload_all();
  accelerator_ = std::move(accelerator);
}

void MoeExecutor::begin_step(StepRows rows) {
  rows_ = std::move(rows);
  accelerator_->begin_step(rows_);
}

void MoeExecutor::check(int layer, const LayerRouting& routing) const {
  if (layer < 0 || layer >= store_.num_layers()) {
    throw std::invalid_argument("MoE layer " + std::to_string(layer) + " of " +
                                std::to_string(store_.num_layers()));
  }
  if (size_t(routing.num_tokens) != rows_.requests.size()) {
    throw std::invalid_argument("the step began with " + std::to_string(rows_.requests.size()) +
                                " rows, forward got " + std::to_string(routing.num_tokens) + " tokens");
  }
  if (routing.top_k > kMaxRouted) {
    throw std::invalid_argument("top-k " + std::to_string(routing.top_k) + " is above the supported " +
                                std::to_string(kMaxRouted));
  }
}

void MoeExecutor::forward(int layer, const LayerRouting& routing, const float* normed, float* hidden) {
  check(layer, routing);
  const WorkTimer timer(Work::kExperts);
  groups_.assign(routing, store_.num_experts());
  placements_.resize(size_t(groups_.size()));
  accelerator_->dense(layer, routing.num_tokens);
  const LayerTimes times = accelerator_->place(layer, routing, groups_, placements_);

  const auto begin = std::chrono::steady_clock::now();
  if (DeviceExperts* const device = accelerator_->device_experts(); device == nullptr) {
    group_weights_.clear();
    for (const GroupPlacement& placement : placements_) group_weights_.push_back(placement.weights);
    compute_.run(routing, groups_, store_.layout(layer), group_weights_, normed, hidden);
  } else {
    const auto on_cpu = [&](int g) { return placements_[size_t(g)].where == Placement::kCpu; };
    take_groups(on_device_, device_weights_, [&](int g) { return !on_cpu(g); });
    take_groups(on_cpu_, cpu_weights_, on_cpu);
    if (on_device_.size() > 0) device->begin(layer, routing, on_device_, device_weights_, normed);
    compute_.run(routing, on_cpu_, store_.layout(layer), cpu_weights_, normed, hidden);
    if (on_device_.size() > 0) device->finish(hidden);
  }
  const std::chrono::duration<float, std::micro> measured = std::chrono::steady_clock::now() - begin;
  if (accelerator_->virtual_now_us() < 0) accelerator_->measured(times, routing.num_tokens, measured.count());
  record(layer, routing, times, measured.count());
}

template <typename Choose>
void MoeExecutor::take_groups(ExpertGroups& part, std::vector<const std::byte*>& weights, Choose choose) {
  part.experts.clear();
  part.begin.assign(1, 0);
  part.pairs.clear();
  weights.clear();
  for (int g = 0; g < groups_.size(); ++g) {
    if (!choose(g)) continue;
    part.experts.push_back(groups_.experts[size_t(g)]);
    const auto pairs = groups_.pairs.begin();
    part.pairs.insert(part.pairs.end(), pairs + groups_.begin[size_t(g)],
                      pairs + groups_.begin[size_t(g) + 1]);
    part.begin.push_back(int(part.pairs.size()));
    weights.push_back(placements_[size_t(g)].weights);
  }
}

void MoeExecutor::follow(int layer, const LayerRouting& routing, std::span<const Placement> where,
                         double us) {
  check(layer, routing);
  if (where.size() != size_t(routing.num_tokens) * size_t(routing.top_k)) {
    throw std::invalid_argument(std::to_string(where.size()) + " placements for " +
                                std::to_string(routing.num_tokens) + " tokens of " +
                                std::to_string(routing.top_k) + " experts");
  }
  groups_.assign(routing, store_.num_experts());
  placements_.resize(size_t(groups_.size()));
  for (int g = 0; g < groups_.size(); ++g) {
    const int pair = groups_.pairs[size_t(groups_.begin[size_t(g)])];
    placements_[size_t(g)] = {nullptr, where[size_t(pair)]};
  }
  const LayerTimes times = accelerator_->follow(layer, routing, groups_, where);
  accelerator_->measured(times, routing.num_tokens, us);
  record(layer, routing, times, float(us));
}

void MoeExecutor::end_step() { accelerator_->dense(store_.num_layers(), int(rows_.requests.size())); }

void MoeExecutor::record(int layer, const LayerRouting& routing, const LayerTimes& times, float measured_us) {
  for (int g = 0; g < groups_.size(); ++g) {
    const Placement where = placements_[size_t(g)].where;
    where_of_expert_[size_t(groups_.experts[size_t(g)])] = uint8_t(where);
    int64_t& count = where == Placement::kHit   ? events_.counts.hits
                     : where == Placement::kCpu ? events_.counts.cpu_misses
                                                : events_.counts.fetched;
    count += groups_.load(g);
  }
  if (!events_.enabled) return;
  const bool real_time = accelerator_->virtual_now_us() < 0;
  TokenLayerEvent event{};
  event.step = rows_.step;
  event.layer = int16_t(layer);
  event.num_routed = uint8_t(routing.top_k);
  event.layer_us = real_time ? measured_us : float(times.layer_us);
  event.cpu_us = real_time ? measured_us : float(times.cpu_us);
  event.gpu_us = float(times.gpu_us);
  event.predicted_us = float(times.layer_us);
  for (int t = 0; t < routing.num_tokens; ++t) {
    event.request = rows_.requests[size_t(t)];
    event.position = rows_.positions[size_t(t)];
    uint8_t counts[3] = {0, 0, 0};
    for (int k = 0; k < routing.top_k; ++k) {
      const size_t pair = size_t(t) * size_t(routing.top_k) + size_t(k);
      const uint8_t where = where_of_expert_[size_t(routing.ids[pair])];
      event.experts[k] = uint16_t(routing.ids[pair]);
      event.placement[k] = where;
      event.weights[k] = routing.weights[pair];
      ++counts[where];
    }
    event.num_hits = counts[uint8_t(Placement::kHit)];
    event.num_cpu = counts[uint8_t(Placement::kCpu)];
    event.num_fetched = counts[uint8_t(Placement::kFetched)];
    events_.token_layers.push(event);
  }
}

}  // namespace twofold
