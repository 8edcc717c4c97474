#include "twofold/layer_planner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

namespace twofold {

LayerPlanner::LayerPlanner(const CostModel& cost, const LayerSchedulerConfig& config)
    : config_(config),
      planners_(planners_of(cost)),
      memo_(cost, config.top_k),
      deferral_(config.num_deferred, config.num_layers) {}

std::vector<LanePlanner> LayerPlanner::planners_of(const CostModel& cost) {
  std::vector<LanePlanner> planners;
  for (int d = 0; d < cost.num_devices(); ++d) planners.emplace_back(cost.with_home(d));
  return planners;
}

void LayerPlanner::recalibrate(const CostModel& cost) {
  planners_ = planners_of(cost);
  memo_ = SplitMemo(cost, config_.top_k);
}

void LayerPlanner::plan(const RoutedLayer& routed, const LaneStates& lanes,
                        std::span<const uint8_t> generated_rows, const Devices& devices, StreamAhead& ahead,
                        LayerDecision& decision, std::vector<DeviceShare>& shares) {
  collect_loads(routed, devices);
  states_.clear();
  for (int d = 0; d < devices.count(); ++d) {
    const Link& link = devices.link(d);
    states_.push_back({link.backlog_us(), link.queued_us(), devices.num_staging()});
  }
  lanes_ = lanes;
  lanes_.devices = states_;
  if (config_.fetch_rule != FetchRule::kBestSplit) {
    plan_ = as_peer(routed.layer);
  } else if (routed.num_tokens > 1) {
    plan_ = with_ahead(routed.layer, devices, ahead);
  } else if (devices.count() == 1 && deferral_.most() == 0) {
    plan_ = looked_up();
  } else {
    mark_deferrable(routed, generated_rows);
    plan_ = planner(routed.layer).plan(loads_, lanes_, false);
  }
  write(routed.layer, devices, ahead, decision, shares);
}

void LayerPlanner::collect_loads(const RoutedLayer& routed, const Devices& devices) {
  const int layer = routed.layer;
  const auto active = devices.active(layer), tokens = devices.loads(layer);
  order_.resize(active.size());
  std::iota(order_.begin(), order_.end(), 0);
  if (routed.num_tokens == 1) {
    // Interchangeable for this layer; for the next tokens the more valuable ones are the better ones to have.
    ExpertCache& cache = devices.cache(config_.home(layer));
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
      const std::vector<double>& values = cache.values(layer);
      return values[size_t(active[size_t(a)])] > values[size_t(active[size_t(b)])];
    });
  }
  loads_.clear();
  for (int i : order_) {
    ExpertLoad load = devices.load_of(layer, active[size_t(i)], tokens[size_t(i)]);
    if (load.resident == 0 && config_.fetch_rule == FetchRule::kBestSplit)
      load.barred |= worse_places(layer, load.expert, routed.num_tokens == 1, devices);
    loads_.push_back(load);
  }
}

uint32_t LayerPlanner::worse_places(int layer, int expert, bool one_token, const Devices& devices) const {
  if (devices.count() == 1) return 0;
  std::array<Devices::SlotOutcome, kMostDevices> outcomes{};
  for (int d = 0; d < devices.count(); ++d) outcomes[size_t(d)] = devices.slot_outcome_of(layer, expert, d);
  const Devices::SlotOutcome best = *std::max_element(outcomes.begin(), outcomes.begin() + devices.count());
  if (!one_token && best != Devices::SlotOutcome::kFree) return 0;
  uint32_t worse = 0;
  for (int d = 0; d < devices.count(); ++d) worse |= uint32_t(outcomes[size_t(d)] != best) << d;
  return worse;
}

std::span<const int> LayerPlanner::defer(const RoutedLayer& routed, std::span<const uint8_t> generated_rows,
                                         LayerDecision& decision) {
  if (deferral_.most() == 0) return {};
  by_expert_.assign(size_t(config_.num_experts), 0);
  for (const ExpertDecision& e : decision.experts) by_expert_[size_t(e.expert)] = e.where == Placement::kCpu;
  on_cpu_.clear();
  for (const int32_t id : routed.ids) on_cpu_.push_back(uint8_t(by_expert_[size_t(id)]));
  decision.deferred = deferral_.choose(routed.layer, routed.weights, routed.top_k(), generated_rows, on_cpu_);
  if (decision.deferred.empty()) return {};
  by_expert_.assign(by_expert_.size(), 0);
  for (size_t pair = 0; pair < routed.ids.size(); ++pair)
    by_expert_[size_t(routed.ids[pair])] += decision.deferred[pair];
  deferred_tokens_.clear();
  for (const ExpertDecision& e : decision.experts) deferred_tokens_.push_back(by_expert_[size_t(e.expert)]);
  return deferred_tokens_;
}

void LayerPlanner::mark_deferrable(const RoutedLayer& routed, std::span<const uint8_t> generated_rows) {
  all_.assign(routed.ids.size(), 1);
  const auto pairs = deferral_.choose(routed.layer, routed.weights, routed.top_k(), generated_rows, all_);
  for (size_t pair = 0; pair < pairs.size(); ++pair) {
    const auto load = std::find_if(loads_.begin(), loads_.end(),
                                   [&](const ExpertLoad& each) { return each.expert == routed.ids[pair]; });
    load->deferrable = pairs[pair] != 0;
  }
}

LanePlan LayerPlanner::looked_up() {
  LanePlan plan{.devices = {{}}, .cpu = {}, .streamed = false, .times = {}};
  std::vector<int> misses;
  for (const ExpertLoad& load : loads_) {
    (load.resident != 0 ? plan.devices[0].hits : load.barred != 0 ? plan.cpu : misses).push_back(load.expert);
  }
  const int count = memo_.split(int(plan.devices[0].hits.size()), int(misses.size()), int(plan.cpu.size()),
                                states_[0].backlog_us);
  const auto split = misses.begin() + std::min(count, states_[0].max_fetch);
  plan.devices[0].fetch.assign(misses.begin(), split);
  plan.cpu.insert(plan.cpu.end(), split, misses.end());
  return plan;
}

LanePlan LayerPlanner::with_ahead(int layer, const Devices& devices, StreamAhead& ahead) {
  if (!ahead.holds_any()) return planner(layer).plan(loads_, lanes_, true);
  std::vector<ExpertLoad> with(loads_);
  std::vector<DeviceState> states(states_);
  bool any = false;
  for (ExpertLoad& load : with) {
    const StreamAhead::Expert* held = ahead.find(load.expert);
    if (held == nullptr || load.resident != 0 || devices.holds(layer, load.expert)) continue;
    load.resident = 1U << held->device;
    --states[size_t(held->device)].max_fetch;
    any = true;
  }
  LanePlan plan;
  if (any) {
    LaneStates lanes = lanes_;
    lanes.devices = states;
    plan = planner(layer).plan(with, lanes, true);
  }
  LanePlan without = planner(layer).plan(loads_, lanes_, true);
  if (any && without.times.layer_us >= plan.times.layer_us * (1 - 1e-12)) return plan;
  ahead.discard();
  return without;
}

// Such engines keep a layer on one device: its home here.
LanePlan LayerPlanner::as_peer(int layer) const {
  const size_t home = size_t(config_.home(layer));
  LanePlan plan;
  plan.devices.resize(states_.size());
  std::vector<ExpertLoad> plannable;
  for (const ExpertLoad& load : loads_) {
    if (load.resident == 0 && (load.barred >> home & 1U) != 0) continue;
    plannable.push_back(load);
    if (load.resident == 0) continue;
    size_t device = home;
    if ((load.resident >> home & 1U) == 0) device = size_t(std::countr_zero(load.resident));
    plan.devices[device].hits.push_back(load.expert);
  }
  std::sort(plannable.begin(), plannable.end(),
            [](const ExpertLoad& a, const ExpertLoad& b) { return a.expert < b.expert; });
  plan.devices[home].fetch =
      peer_fetches(config_.fetch_rule, cost(layer), plannable, states_[home].backlog_us);
  if (int(plan.devices[home].fetch.size()) > states_[home].max_fetch)
    plan.devices[home].fetch.resize(size_t(states_[home].max_fetch));
  return plan;
}

void LayerPlanner::write(int layer, const Devices& devices, const StreamAhead& ahead, LayerDecision& decision,
                         std::vector<DeviceShare>& shares) const {
  const auto active = devices.active(layer), tokens = devices.loads(layer);
  for (size_t i = 0; i < active.size(); ++i) decision.experts.push_back({active[i], tokens[i]});
  const auto index_of = [active](int expert) {
    return int(std::lower_bound(active.begin(), active.end(), expert) - active.begin());
  };
  for (int d = 0; d < devices.count(); ++d) {
    DeviceShare& share = shares[size_t(d)];
    share.begun.clear();
    share.fetch.clear();
    share.one_transfer = plan_.streamed;
    const DeviceLane& planned = plan_.devices[size_t(d)];
    for (int expert : planned.hits) {
      const int i = index_of(expert);
      ExpertDecision& e = decision.experts[size_t(i)];
      e.device = d;
      e.slot = devices.cache(d).slot_of(layer, expert);
      e.where = Placement::kHit;
      if (e.slot >= 0) continue;
      const StreamAhead::Expert& held = *ahead.find(expert);
      e.slot = held.what.slot;
      e.where = Placement::kFetched;
      e.landed = held.landed;
      if (!held.landed) share.begun.push_back(i);
    }
    for (int expert : planned.fetch) share.fetch.push_back(index_of(expert));
  }
}

std::vector<uint8_t> LayerPlanner::split_table() {
  std::vector<uint8_t> table;
  for (int hits = 0; hits <= config_.top_k; ++hits) {
    for (int misses = 0; misses <= config_.top_k; ++misses)
      table.push_back(hits + misses > config_.top_k ? uint8_t{0} : fetched_of(hits, misses));
  }
  return table;
}

uint8_t LayerPlanner::fetched_of(int hits, int misses) {
  if (config_.fetch_rule == FetchRule::kBestSplit)
    return static_cast<uint8_t>(memo_.split(hits, misses, 0, 0));
  std::vector<ExpertLoad> active;
  for (int i = 0; i < hits + misses; ++i) active.push_back({i, 1, i < hits ? 1U : 0U});
  return static_cast<uint8_t>(peer_fetches(config_.fetch_rule, cost(0), active, 0).size());
}

}  // namespace twofold
