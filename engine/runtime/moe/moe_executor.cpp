#include "moe/moe_executor.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/work_clock.h"

namespace twofold {

MoeExecutor::MoeExecutor(ThreadPool& pool, const ExpertStore& store, std::optional<CostModel> cost,
                         int num_deferred)
    : store_(store),
      routing_counts_(store.num_layers(), store.num_experts()),
      accelerator_(std::make_unique<NoAccelerator>(store, std::move(cost), num_deferred)),
      correction_(store.num_layers()),
      compute_(pool, store, accelerator_->rounding()),
      where_of_expert_(size_t(store.num_experts())),
      device_of_expert_(size_t(store.num_experts())) {}

MoeExecutor::MoeExecutor(ThreadPool& pool, const ExpertStore& store,
                         std::shared_ptr<SlottedAccelerator> accelerator, bool preload, int64_t first_step)
    : store_(store),
      routing_counts_(store.num_layers(), store.num_experts()),
      correction_(store.num_layers()),
      compute_(pool, store, accelerator->rounding()),
      where_of_expert_(size_t(store.num_experts())),
      device_of_expert_(size_t(store.num_experts())) {
  accelerator->record_to(events_);
  if (first_step >= 0) accelerator->record_fill(first_step);
  accelerator->fill_pinned();
  if (preload) accelerator->preload_all();
  accelerator_ = std::move(accelerator);
}

void MoeExecutor::begin_step(StepRows rows) {
  rows_ = std::move(rows);
  const auto expect_rows = [&](const std::vector<uint8_t>& given, const char* what) {
    if (given.empty() || given.size() == rows_.requests.size()) return;
    throw std::invalid_argument(std::to_string(given.size()) + " rows are said to be " + what + " or not, " +
                                std::to_string(rows_.requests.size()) + " rows were expected");
  };
  expect_rows(rows_.generated, "generated");
  expect_rows(rows_.pictures, "of pictures");
  layer_ = -1;  // an aborted step may have left one
  routing_counts_.begin_step(rows_);
  deferred_.clear();
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

void MoeExecutor::place(int layer, const LayerRouting& routing) {
  check(layer, routing);
  groups_.assign(routing, store_.num_experts());
  placements_.resize(size_t(groups_.size()));
  accelerator_->dense(layer, routing.num_tokens);
  times_ = accelerator_->place(layer, routing, groups_, placements_);
  estimated_us_ = predicted(layer, routing, times_);
}

void MoeExecutor::forward(int layer, const LayerRouting& routing, const float* normed, float* hidden) {
  const WorkTimer timer(Work::kExperts);
  place(layer, routing);
  accelerator_->host_computes();
  const auto begin = std::chrono::steady_clock::now();
  deferred_.join(hidden, store_.shape().hidden);
  take_deferred();
  if (later_.groups.size() == 0) {
    group_weights_.clear();
    for (const GroupPlacement& placement : placements_) group_weights_.push_back(placement.weights);
    compute_.run(layer, routing, groups_, group_weights_, normed, hidden);
  } else {
    const auto deferred = accelerator_->deferred();
    take_groups(now_, [&](const GroupPlacement&, int pair) { return !deferred[size_t(pair)]; });
    compute_.run(layer, routing, now_.groups, now_.weights, normed, hidden);
    compute_deferred(layer, routing, normed);
  }
  const std::chrono::duration<float, std::micro> measured = std::chrono::steady_clock::now() - begin;
  record(layer, routing, times_, estimated_us_, {.layer_us = measured.count()});
}

template <typename Choose>
void MoeExecutor::take_groups(PlacedGroups& part, Choose choose) const {
  ExpertGroups& taken = part.groups;
  taken.experts.clear();
  taken.begin.assign(1, 0);
  taken.pairs.clear();
  part.weights.clear();
  for (int g = 0; g < groups_.size(); ++g) {
    for (int i = groups_.begin[size_t(g)]; i < groups_.begin[size_t(g) + 1]; ++i) {
      const int pair = groups_.pairs[size_t(i)];
      if (choose(placements_[size_t(g)], pair)) taken.pairs.push_back(pair);
    }
    if (int(taken.pairs.size()) == taken.begin.back()) continue;
    taken.experts.push_back(groups_.experts[size_t(g)]);
    taken.begin.push_back(int(taken.pairs.size()));
    part.weights.push_back(placements_[size_t(g)].weights);
  }
}

void MoeExecutor::take_deferred() {
  const auto deferred = accelerator_->deferred();
  if (deferred.empty()) {
    later_.groups.experts.clear();
    return;
  }
  take_groups(later_, [&](const GroupPlacement&, int pair) { return deferred[size_t(pair)] != 0; });
}

void MoeExecutor::compute_deferred(int layer, const LayerRouting& routing, const float* normed) {
  if (later_.groups.size() == 0) return;
  float* sums = deferred_.begin(routing.num_tokens, store_.shape().hidden, later_.groups, routing.top_k);
  compute_.run(layer, routing, later_.groups, later_.weights, normed, sums);
}

const LayerPlan& MoeExecutor::begin_layer(int layer, const LayerRouting& routing) {
  if (layer_ >= 0) throw std::logic_error("layer " + std::to_string(layer_) + " has not ended");
  place(layer, routing);
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  ids_.assign(routing.ids, routing.ids + num_pairs);
  weights_.assign(routing.weights, routing.weights + num_pairs);
  routing_ = {ids_.data(), weights_.data(), routing.num_tokens, routing.top_k};
  const auto on_cpu = [](const GroupPlacement& p) { return p.where == Placement::kCpu; };
  plan_.devices.resize(size_t(accelerator_->num_devices()));
  for (size_t d = 0; d < plan_.devices.size(); ++d) {
    const auto takes = [&](const GroupPlacement& p, bool awaited) {
      return !on_cpu(p) && p.awaited == awaited && p.device == int(d);
    };
    take_groups(plan_.devices[d].ready, [&](const GroupPlacement& p, int) { return takes(p, false); });
    take_groups(plan_.devices[d].awaited, [&](const GroupPlacement& p, int) { return takes(p, true); });
  }
  const auto deferred = accelerator_->deferred();
  take_groups(plan_.on_cpu, [&](const GroupPlacement& p, int pair) {
    return on_cpu(p) && (deferred.empty() || !deferred[size_t(pair)]);
  });
  take_deferred();
  plan_.joins_deferred = deferred_.any();
  plan_.uses_cpu = plan_.joins_deferred || plan_.on_cpu.groups.size() > 0 || later_.groups.size() > 0;
  plan_.where.resize(num_pairs);
  for (int g = 0; g < groups_.size(); ++g) {
    for (int i = groups_.begin[size_t(g)]; i < groups_.begin[size_t(g) + 1]; ++i)
      plan_.where[size_t(groups_.pairs[size_t(i)])] = placements_[size_t(g)].where;
  }
  layer_ = layer;
  host_us_ = 0;
  return plan_;
}

void MoeExecutor::compute_cpu(const float* normed, float* rows) {
  const LayerRouting& routing = expect_begun("compute_cpu");
  const WorkTimer timer(Work::kExperts);
  std::fill_n(rows, size_t(routing.num_tokens) * size_t(store_.shape().hidden), 0.0f);
  if (!plan_.uses_cpu) return;
  const auto begin = std::chrono::steady_clock::now();
  deferred_.join(rows, store_.shape().hidden);
  if (plan_.on_cpu.groups.size() > 0)
    compute_.run(layer_, routing, plan_.on_cpu.groups, plan_.on_cpu.weights, normed, rows);
  compute_deferred(layer_, routing, normed);
  const std::chrono::duration<double, std::micro> measured = std::chrono::steady_clock::now() - begin;
  host_us_ += measured.count();
}

void MoeExecutor::end_layer(double us, double dense_us) {
  const LayerRouting& routing = expect_begun("end_layer");
  keep_parts(us, host_us_, dense_us);
  record(layer_, routing, times_, estimated_us_, {.layer_us = us});
  layer_ = -1;
}

const LayerRouting& MoeExecutor::expect_begun(const char* call) const {
  if (layer_ < 0) throw std::logic_error(std::string(call) + " was called before begin_layer");
  return routing_;
}

void MoeExecutor::follow(int layer, const LayerRouting& routing, std::span<const Placement> where,
                         const MeasuredTimes& measured) {
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
  keep_parts(measured.layer_us, measured.layer_us - std::max(measured.gpu_us, 0.0), measured.dense_us);
  record(layer, routing, times, predicted(layer, routing, times), measured);
}

void MoeExecutor::end_step(bool with_head) {
  if (with_head) accelerator_->dense(store_.num_layers(), int(rows_.requests.size()));
  accelerator_->end_step();
  routing_counts_.end_step();
}

double MoeExecutor::predicted(int layer, const LayerRouting& routing, const LayerTimes& times) const {
  const bool real_time = accelerator_->virtual_now_us() < 0;
  return real_time ? times.layer_us * correction_.factor(layer, routing.num_tokens) : times.layer_us;
}

void MoeExecutor::keep_parts(double layer_us, double cpu_us, double dense_us) {
  layer_us = std::max(layer_us, 0.0);
  cpu_us = std::clamp(cpu_us, 0.0, layer_us);
  device_parts_.experts_cpu_us += cpu_us;
  device_parts_.experts_gpu_us += layer_us - cpu_us;
  device_parts_.dense_us += std::max(dense_us, 0.0);
}

void MoeExecutor::record(int layer, const LayerRouting& routing, const LayerTimes& times, double predicted_us,
                         const MeasuredTimes& measured) {
  for (int g = 0; g < groups_.size(); ++g) {
    const Placement where = placements_[size_t(g)].where;
    where_of_expert_[size_t(groups_.experts[size_t(g)])] = uint8_t(where);
    device_of_expert_[size_t(groups_.experts[size_t(g)])] = uint8_t(placements_[size_t(g)].device);
    int64_t& count = where == Placement::kHit   ? events_.counts.hits
                     : where == Placement::kCpu ? events_.counts.cpu_misses
                                                : events_.counts.fetched;
    count += groups_.load(g);
  }
  events_.num_expert_runs += groups_.size();
  for (const uint8_t waits : accelerator_->deferred()) events_.counts.deferred += waits;
  routing_counts_.add(layer, routing, groups_, where_of_expert_);
  const bool real_time = accelerator_->virtual_now_us() < 0;
  const double layer_us = std::max(measured.layer_us, 0.0);
  if (real_time) correction_.update(layer, routing.num_tokens, predicted_us, layer_us);
  if (!events_.enabled || !rows_.is_recorded) return;
  TokenLayerEvent event{};
  event.step = rows_.step;
  event.layer = int16_t(layer);
  event.num_routed = uint8_t(routing.top_k);
  event.layer_us = float(real_time ? layer_us : times.layer_us);
  event.cpu_us = float(!real_time ? times.cpu_us : measured.cpu_us >= 0 ? measured.cpu_us : layer_us);
  event.gpu_us = float(real_time && measured.gpu_us >= 0 ? measured.gpu_us : times.gpu_us);
  event.predicted_us = float(predicted_us);
  for (int t = 0; t < routing.num_tokens; ++t) {
    event.request = rows_.requests[size_t(t)];
    event.position = rows_.positions[size_t(t)];
    uint8_t counts[kNumPlacements] = {};
    for (int k = 0; k < routing.top_k; ++k) {
      const size_t pair = size_t(t) * size_t(routing.top_k) + size_t(k);
      const uint8_t where = where_of_expert_[size_t(routing.ids[pair])];
      event.experts[k] = uint16_t(routing.ids[pair]);
      event.placement[k] = where;
      event.weights[k] = routing.weights[pair];
      event.devices[k] = device_of_expert_[size_t(routing.ids[pair])];
      ++counts[where];
    }
    event.num_hits = counts[uint8_t(Placement::kHit)];
    event.num_cpu = counts[uint8_t(Placement::kCpu)];
    event.num_fetched = counts[uint8_t(Placement::kFetched)];
    events_.token_layers.push(event);
  }
}

}  // namespace twofold
