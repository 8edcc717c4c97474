// Several devices: how a layer's plan spreads over them, and the market in which they compete for experts.
//
// Every device has a cache with its own rent and price of an upload (policy_payback.cpp), in misses of its own. One
// miss of a device is worth what a hit there saves (CostModel::miss_us), so offers of all devices compare in
// microseconds: value of the expert - value of the victim - price of the upload over this link. An expert is
// uploaded to the device with the best offer. One that another device holds already moves if the offer exceeds its
// worth there; its old slot is freed when the new copy has landed. Or it is copied: a second copy saves no miss, but the
// planner may then run the expert where the layer ends first. What one use of it saves (balance_us) is learned by
// planning some layers twice, the second time with one more copy. A cache's values are relative to its rent, so copies
// are weighed by use rates instead: by what each use saves, over the next 128 events of the layer.
#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "twofold/layer_scheduler.h"

namespace twofold {

namespace {

void refuse(const char* what) {
  throw std::invalid_argument(
      "layer scheduler: " + std::string(what) +
      " given for a machine of several devices, where it is not supported; leave it out or "
      "use one device");
}

void check(const CostModel& cost, const LayerSchedulerConfig& config, size_t num_links) {
  const auto num_devices = static_cast<size_t>(cost.num_devices());
  if (num_links != num_devices || static_cast<size_t>(config.num_devices()) != num_devices) {
    throw std::invalid_argument("layer scheduler: slots for " + std::to_string(config.num_devices()) +
                                " devices and " + std::to_string(num_links) + " links given, " +
                                std::to_string(num_devices) +
                                " of each expected, one per device of the machine");
  }
  if (num_devices == 1) return;
  if (config.fetch_rule != FetchRule::kBestSplit || config.always_cache_fetched)
    refuse("another engine's rule");
  const auto is_known = [num_devices](int home) {
    return home >= 0 && static_cast<size_t>(home) < num_devices;
  };
  if (!config.homes.empty() && (config.homes.size() != static_cast<size_t>(config.num_layers) ||
                                !std::all_of(config.homes.begin(), config.homes.end(), is_known))) {
    throw std::invalid_argument("layer scheduler: homes of " + std::to_string(config.homes.size()) +
                                " layers given, a device for each of " + std::to_string(config.num_layers) +
                                " expected");
  }
  if (config.prefetch) refuse("prefetch");
  if (config.num_deferred > 0) refuse("num_deferred");
  if (config.replace_from > 0) refuse("replace_from");
  if (cache_policy(config.policy).offline) refuse("an offline policy");
}

}  // namespace

std::vector<LayerScheduler::Device> LayerScheduler::devices_of(const CostModel& cost,
                                                               const LayerSchedulerConfig& config,
                                                               std::span<Link* const> links) {
  check(cost, config, links.size());
  std::vector<Device> devices(links.size());
  for (size_t d = 0; d < links.size(); ++d) {
    devices[d].link = links[d];
    devices[d].cache = make_cache(cost, config, static_cast<int>(d));
  }
  return devices;
}

std::vector<LayerScheduler::Home> LayerScheduler::homes_of(const CostModel& cost) {
  std::vector<Home> homes;
  for (int d = 0; cost.num_devices() > 1 && d < cost.num_devices(); ++d) {
    const CostModel priced = cost.with_home(d);
    homes.push_back({priced, MachinePlanner(priced)});
  }
  return homes;
}

void LayerScheduler::plan_machine(int layer, int num_tokens) {
  const auto active = cache_->active(layer);
  const auto loads = cache_->loads(layer);
  std::vector<int> order(active.size());
  std::iota(order.begin(), order.end(), 0);
  // Experts of equal load are interchangeable for this layer; the more valuable ones are fetched.
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return cache_->value(layer, active[size_t(a)]) > cache_->value(layer, active[size_t(b)]);
  });
  machine_loads_.clear();
  for (int i : order) {
    MachineLoad load{active[size_t(i)], loads[size_t(i)]};
    for (int d = 0; d < num_devices(); ++d) {
      const ExpertState state = cache(d).state(layer, load.expert);
      if (state == ExpertState::kResident) load.resident |= 1U << d;
      if (state == ExpertState::kInFlight || cache(d).config().pin(layer) == LayerPin::kNever)
        load.barred |= 1U << d;
    }
    machine_loads_.push_back(load);
  }
  device_states_.clear();
  for (const Device& device : devices_)
    device_states_.push_back({device.link->backlog_us(), device.link->queued_us(), num_staging()});
  const MachinePlan plan = home_of(layer).planner.plan(machine_loads_, device_states_, num_tokens > 1);

  count_uses(layer);
  learn_balance(plan, num_tokens > 1);

  for (size_t i = 0; i < active.size(); ++i) decision_.experts.push_back({active[i], loads[i]});
  const auto index_of = [active](int expert) {
    return int(std::lower_bound(active.begin(), active.end(), expert) - active.begin());
  };
  for (int d = 0; d < num_devices(); ++d) {
    const DevicePlan& share = plan.devices[size_t(d)];
    for (int expert : share.hits) {
      ExpertDecision& e = decision_.experts[size_t(index_of(expert))];
      e.where = Placement::kHit;
      e.slot = cache(d).slot_of(layer, expert);
      e.device = d;
    }
    Device& device = devices_[size_t(d)];
    device.fetch.clear();
    device.one_transfer = plan.streamed;
    for (int expert : share.fetch) device.fetch.push_back(index_of(expert));
  }
}

bool LayerScheduler::is_held_elsewhere(int layer, int expert, int device) const {
  for (int d = 0; d < num_devices(); ++d) {
    if (d != device && cache(d).slot_of(layer, expert) >= 0) return true;
  }
  return false;
}

double LayerScheduler::worth_us(int device, double value) const {
  return value * cost_.device(device).miss_us();
}

void LayerScheduler::count_uses(int layer) {
  constexpr float kRate = 1.0F / 64;
  float* rates = use_rate_.data() + size_t(layer) * size_t(config_.num_experts);
  for (int expert = 0; expert < config_.num_experts; ++expert) rates[expert] *= 1 - kRate;
  for (const int expert : cache_->active(layer)) rates[expert] += kRate;
}

double LayerScheduler::saved_us(int device, int layer, int expert, bool is_copy) const {
  constexpr double kEvents = 128;
  const double rate = double(use_rate_[size_t(layer * config_.num_experts + expert)]);
  return kEvents * rate * (is_copy ? devices_[size_t(device)].balance_us : cost_.device(device).miss_us());
}

// A trial per kLearnEvery layers keeps the cost of planning.
void LayerScheduler::learn_balance(const MachinePlan& plan, bool may_stream) {
  constexpr int64_t kLearnEvery = 8;
  constexpr double kLearnRate = 0.05;
  if (config_.fixed_placement || num_planned_++ % kLearnEvery != 0) return;
  const auto turn = size_t(num_planned_ / kLearnEvery);
  const auto d = turn % devices_.size();
  for (size_t n = 0; n < machine_loads_.size(); ++n) {
    MachineLoad& load = machine_loads_[(turn + n) % machine_loads_.size()];
    if (load.resident == 0 || (load.resident & 1U << d) != 0) continue;
    load.resident |= 1U << d;
    const MachinePlan other =
        home_of(decision_.layer).planner.plan(machine_loads_, device_states_, may_stream);
    const double saved_us = std::max(0.0, plan.times.layer_us - other.times.layer_us);
    devices_[d].balance_us += kLearnRate * (saved_us - devices_[d].balance_us);
    return;
  }
}

// The least used expert here that another device has too. None that the layer routes to: it may run now.
int LayerScheduler::cheapest_copy(int device, int layer) {
  Device& own = devices_[size_t(device)];
  const auto may_leave = [&](int cell) {
    const int of_layer = cell / config_.num_experts, expert = cell % config_.num_experts;
    const auto active = cache_->active(layer);
    return own.cache->is_resident(of_layer, expert) && is_held_elsewhere(of_layer, expert, device) &&
           (of_layer != layer || !std::binary_search(active.begin(), active.end(), expert));
  };
  if (!own.knows_copy) {
    own.knows_copy = true;
    own.cheapest_copy = -1;
    float least = std::numeric_limits<float>::infinity();
    for (size_t cell = 0; cell < copied_.size(); ++cell) {
      if (!copied_[cell] || use_rate_[cell] >= least || !may_leave(int(cell))) continue;
      own.cheapest_copy = int(cell);
      least = use_rate_[cell];
    }
  }
  return own.cheapest_copy >= 0 && may_leave(own.cheapest_copy) ? own.cheapest_copy : -1;
}

LayerScheduler::Offer LayerScheduler::best_offer(int layer, int expert, int tokens) {
  double held_us = 0;
  bool is_held = false;
  for (int d = 0; d < num_devices(); ++d) {
    const ExpertState state = cache(d).state(layer, expert);
    if (state == ExpertState::kInFlight) return {};
    if (state == ExpertState::kAbsent) continue;
    const double worth = worth_us(d, cache(d).value(layer, expert));
    held_us = is_held ? std::max(held_us, worth) : worth;
    is_held = true;
  }
  // Scores that only rank have no price: a free slot, else the least valued victim.
  const bool ranks = cache_->policy().prefetches != Prefetching::kAuto;
  if (is_held && ranks) return {};
  Offer best;
  const auto bid = [&best](const Offer& offer, bool needs_gain) {
    if (best.device >= 0 ? offer.gain_us > best.gain_us : !needs_gain || offer.gain_us > 0) best = offer;
  };
  for (int d = 0; d < num_devices(); ++d) {
    if (cache(d).state(layer, expert) != ExpertState::kAbsent) continue;
    if (devices_[size_t(d)].link->num_waiting() >= config_.max_waiting_uploads) continue;
    const auto admission = cache(d).can_admit(layer, expert, false);
    if (ranks) {
      if (admission) bid({d, admission->evicted < 0 ? 0 : -admission->victim_value}, false);
      continue;
    }
    const double price = cache(d).config().upload_price;
    if (admission) {
      // A move's victim misses once more. Values count misses of decode; one in a prompt takes longer.
      const bool swaps = is_held && admission->evicted >= 0 &&
                         !is_held_elsewhere(admission->evicted_layer, admission->evicted, d);
      const CostModel& cost = cost_.device(d);
      const double longer_us = cost.cpu_expert_us(tokens) - cost.gpu_expert_us(tokens) - cost.miss_us();
      bid({d, worth_us(d, admission->value - admission->victim_value - price) - held_us -
                  (swaps ? std::max(0.0, longer_us) : 0.0)},
          is_held);
    }
    if (is_held) {
      const auto forced = cache(d).can_admit(layer, expert, true);
      if (!forced) continue;
      const int of_layer = forced->evicted_layer, victim = forced->evicted;
      const bool loses_copy = victim >= 0 && is_held_elsewhere(of_layer, victim, d);
      const double lost_us = victim < 0 ? 0.0 : saved_us(d, of_layer, victim, loses_copy);
      bid({d, saved_us(d, layer, expert, true) - lost_us - worth_us(d, price), true}, true);
    } else if (!admission || admission->evicted >= 0) {
      const int copy = cheapest_copy(d, layer);
      if (copy < 0) continue;
      const double lost_us = saved_us(d, copy / config_.num_experts, copy % config_.num_experts, true);
      bid({d, saved_us(d, layer, expert, false) - lost_us - worth_us(d, price), false, copy}, true);
    }
  }
  return best;
}

void LayerScheduler::take_offer(int layer, int expert, const Offer& offer) {
  ExpertCache& cache = this->cache(offer.device);
  const int dropped = offer.dropped, of_layer = dropped / config_.num_experts,
            other = dropped % config_.num_experts;
  if (dropped >= 0) {
    cache.evict(of_layer, other);
    devices_[size_t(offer.device)].knows_copy = false;
  }
  auto admission = cache.admit(layer, expert, offer.is_copy || dropped >= 0);
  if (!admission) return;
  copied_[size_t(layer * config_.num_experts + expert)] = offer.is_copy;
  if (dropped >= 0 && admission->evicted < 0) {
    admission->evicted = other;
    admission->evicted_layer = of_layer;
  }
  upload_after_layer(layer, expert, *admission, UploadReason::kAdmission, offer.device);
}

void LayerScheduler::admit_in_market(int layer) {
  if (!config_.background_uploads || config_.fixed_placement) return;
  for (const ExpertDecision& e : decision_.experts) {
    const bool missed = e.where == Placement::kCpu && !is_held_elsewhere(layer, e.expert, -1);
    if (!missed && e.where != Placement::kHit) continue;
    const Offer offer = best_offer(layer, e.expert, e.tokens);
    if (offer.device >= 0) {
      take_offer(layer, e.expert, offer);
      continue;
    }
    if (!missed) continue;
    // A refused bid moves every device's rent.
    for (int d = 0; d < num_devices(); ++d) {
      if (devices_[size_t(d)].link->num_waiting() >= config_.max_waiting_uploads) continue;
      cache(d).admit(layer, e.expert, false);
      if (cache(d).last_refusal() != AdmitRefusal::kPrice) continue;
      const double value = cache(d).value(layer, e.expert);
      if (!decision_.rejection || value > decision_.rejection->value)
        decision_.rejection = {e.expert, value, d};
    }
  }
}

void LayerScheduler::end_move(Publication& landed) {
  if (landed.staged || landed.upload.failed) return;
  if (copied_[size_t(landed.layer * config_.num_experts + landed.expert)]) return;
  for (int d = 0; d < num_devices(); ++d) {
    if (d == landed.device || !cache(d).is_resident(landed.layer, landed.expert)) continue;
    landed.left_device = d;
    landed.left_slot = cache(d).slot_of(landed.layer, landed.expert);
    cache(d).evict(landed.layer, landed.expert);
  }
}

void LayerScheduler::preload_by_usage() {
  if (num_devices() == 1) {
    cache_->preload_by_usage();
    return;
  }
  const auto& usage = config_.prior_usage;
  const size_t experts = size_t(config_.num_experts), layers = size_t(config_.num_layers);
  std::vector<int> order(layers * experts);
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> uses(order.size(), 0.0), used(layers, 0.0);  // per event; per layer in all
  if (!usage.empty()) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return usage[size_t(a)] > usage[size_t(b)]; });
    for (size_t cell = 0; cell < usage.size(); ++cell) used[cell / experts] += usage[cell];
    for (size_t cell = 0; cell < usage.size(); ++cell)
      uses[cell] = usage[cell] * config_.top_k / std::max(used[cell / experts], 1e-300);
  }
  // Expected time of the experts that each device has of a layer. An expert goes where the layer ends first if it is
  // used: at x + g, after the experts that are expected beside it.
  std::vector<double> busy_us(layers * devices_.size(), 0.0);
  for (int cell : order) {
    const size_t layer = size_t(cell) / experts;
    int best = -1;
    double best_us = std::numeric_limits<double>::infinity();
    for (int d = 0; d < num_devices(); ++d) {
      const CostModel& cost = layer_cost(int(layer)).device(d);
      const double us = cost.profile().exchange_us + cost.profile().gpu_launch_us +
                        busy_us[layer * devices_.size() + size_t(d)] + cost.gpu_expert_us(1);
      if (us >= best_us || cache(d).num_free(int(layer)) == 0) continue;
      best = d;
      best_us = us;
    }
    if (best < 0 || !cache(best).preload(int(layer), cell % config_.num_experts)) continue;
    busy_us[layer * devices_.size() + size_t(best)] +=
        uses[size_t(cell)] * layer_cost(int(layer)).device(best).gpu_expert_us(1);
  }
}

}  // namespace twofold
