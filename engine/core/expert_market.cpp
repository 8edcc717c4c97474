#include "twofold/expert_market.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace twofold {

ExpertMarket::ExpertMarket(const CostModel& cost, const LayerSchedulerConfig& config)
    : cost_(cost),
      num_experts_(config.num_experts),
      max_waiting_(config.max_waiting_uploads),
      is_open_(config.background_uploads && !config.fixed_placement),
      moves_(!config.fixed_placement),
      ranks_(cache_policy(config.policy).prefetches != Prefetching::kAuto),
      devices_(static_cast<size_t>(cost.num_devices())),
      copied_(cell_of(config.num_layers, 0)),
      use_rate_(copied_.size()) {}

void ExpertMarket::begin_step() {
  for (Device& device : devices_) device.has_cheapest_copy = false;
}

void ExpertMarket::landed(Publication& landed, Devices& devices) {
  if (landed.staged || landed.upload.failed || copied_[cell_of(landed.layer, landed.expert)]) return;
  for (int d = 0; d < devices.count(); ++d) {
    ExpertCache& cache = devices.cache(d);
    if (d == landed.device || !cache.is_resident(landed.layer, landed.expert)) continue;
    landed.left_device = d;
    landed.left_slot = cache.slot_of(landed.layer, landed.expert);
    cache.evict(landed.layer, landed.expert);
  }
}

void ExpertMarket::learn(int layer, const LayerPlanner& planner, bool may_stream, const Devices& devices) {
  constexpr float kUseRate = 1.0F / 64;
  constexpr int64_t kLearnEvery = 8;  // a trial per so many layers keeps the cost of planning
  constexpr double kLearnRate = 0.05;
  if (devices.count() == 1) return;  // there are no copies
  float* rates = use_rate_.data() + cell_of(layer, 0);
  for (int expert = 0; expert < num_experts_; ++expert) rates[expert] *= 1 - kUseRate;
  for (const int expert : devices.active(layer)) rates[expert] += kUseRate;
  if (!moves_ || num_planned_++ % kLearnEvery != 0) return;
  // The layer planned as if a device had one more of its experts.
  const auto turn = size_t(num_planned_ / kLearnEvery);
  const auto d = turn % devices_.size();
  std::vector<ExpertLoad> loads(planner.loads().begin(), planner.loads().end());
  for (size_t n = 0; n < loads.size(); ++n) {
    ExpertLoad& load = loads[(turn + n) % loads.size()];
    if (load.resident == 0 || (load.resident & 1U << d) != 0) continue;
    load.resident |= 1U << d;
    const LanePlan other = planner.planner(layer).plan(loads, planner.lanes(), may_stream);
    const double saved_us = std::max(0.0, planner.latest().times.layer_us - other.times.layer_us);
    devices_[d].balance_us += kLearnRate * (saved_us - devices_[d].balance_us);
    return;
  }
}

double ExpertMarket::saved_us(int device, size_t cell, bool is_copy) const {
  constexpr double kEvents = 128;
  return kEvents * double(use_rate_[cell]) *
         (is_copy ? devices_[size_t(device)].balance_us : cost_.device(device).miss_us());
}

int ExpertMarket::cheapest_copy(int device, int layer, const Devices& devices) {
  if (num_copied_ == 0) return -1;
  Device& own = devices_[size_t(device)];
  const auto may_leave = [&](int cell) {
    const int of_layer = cell / num_experts_, expert = cell % num_experts_;
    const auto active = devices.active(layer);
    return devices.cache(device).is_resident(of_layer, expert) && devices.holds(of_layer, expert, device) &&
           (of_layer != layer || !std::binary_search(active.begin(), active.end(), expert));
  };
  if (!own.has_cheapest_copy) {
    own.has_cheapest_copy = true;
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

ExpertMarket::Offer ExpertMarket::best_offer(int layer, const ExpertDecision& e, Devices& devices) {
  double held_us = 0;
  bool is_held = false;
  for (int d = 0; d < devices.count(); ++d) {
    const ExpertState state = devices.cache(d).state(layer, e.expert);
    if (state == ExpertState::kInFlight) return {};
    if (state == ExpertState::kAbsent) continue;
    const double worth = worth_us(d, devices.cache(d).values(layer)[size_t(e.expert)]);
    held_us = is_held ? std::max(held_us, worth) : worth;
    is_held = true;
  }
  // Scores that only rank have no price: a free slot, else the least valued victim.
  if (is_held && ranks_) return {};
  Offer best;
  const auto bid = [&best](const Offer& offer, bool needs_gain) {
    if (best.device >= 0 ? offer.gain_us > best.gain_us : !needs_gain || offer.gain_us > 0) best = offer;
  };
  for (int d = 0; d < devices.count(); ++d) {
    ExpertCache& cache = devices.cache(d);
    if (cache.state(layer, e.expert) != ExpertState::kAbsent) continue;
    if (devices.link(d).num_waiting() >= max_waiting_) continue;
    const auto admission = cache.can_admit(layer, e.expert, false);
    if (ranks_) {
      if (admission) bid({d, admission->evicted < 0 ? 0 : -admission->victim_value}, false);
      continue;
    }
    const double price = cache.config().upload_price;
    if (admission) {
      // A move's victim misses once more. Values count misses of decode; one in a prompt takes longer.
      const bool swaps = is_held && admission->evicted >= 0 &&
                         !devices.holds(admission->evicted_layer, admission->evicted, d);
      const DeviceCost& cost = cost_.device(d);
      const double longer_us = cost_.cpu_expert_us(e.tokens) - cost.gpu_expert_us(e.tokens) - cost.miss_us();
      bid({d, worth_us(d, admission->value - admission->victim_value - price) - held_us -
                  (swaps ? std::max(0.0, longer_us) : 0.0)},
          is_held);
    }
    if (is_held) {
      const auto forced = cache.can_admit(layer, e.expert, true);
      if (!forced) continue;
      const int of_layer = forced->evicted_layer, victim = forced->evicted;
      const double lost_us =
          victim < 0 ? 0.0 : saved_us(d, cell_of(of_layer, victim), devices.holds(of_layer, victim, d));
      bid({d, saved_us(d, cell_of(layer, e.expert), true) - lost_us - worth_us(d, price), true}, true);
    } else if (!admission || admission->evicted >= 0) {
      const int copy = cheapest_copy(d, layer, devices);
      if (copy < 0) continue;
      const double lost_us = saved_us(d, size_t(copy), true);
      bid({d, saved_us(d, cell_of(layer, e.expert), false) - lost_us - worth_us(d, price), false, copy},
          true);
    }
  }
  return best;
}

bool ExpertMarket::take(int layer, int expert, const Offer& offer, Devices& devices,
                        LayerDecision& decision) {
  ExpertCache& cache = devices.cache(offer.device);
  const int of_layer = offer.dropped / num_experts_, other = offer.dropped % num_experts_;
  if (offer.dropped >= 0) {
    cache.evict(of_layer, other);
    devices_[size_t(offer.device)].has_cheapest_copy = false;
  }
  auto admission = cache.admit(layer, expert, offer.is_copy || offer.dropped >= 0);
  if (!admission) return false;
  uint8_t& copied = copied_[cell_of(layer, expert)];
  num_copied_ += int(offer.is_copy) - int(copied);
  copied = offer.is_copy;
  if (offer.dropped >= 0 && admission->evicted < 0) {
    admission->evicted = other;
    admission->evicted_layer = of_layer;
  }
  devices.upload(decision.add_move(layer, expert, offer.device, *admission, UploadReason::kAdmission));
  return true;
}

// A refused bid moves every device's rent.
void ExpertMarket::note_refusal(int layer, int expert, Devices& devices, LayerDecision& decision) {
  for (int d = 0; d < devices.count(); ++d) {
    ExpertCache& cache = devices.cache(d);
    if (devices.link(d).num_waiting() >= max_waiting_) continue;
    cache.admit(layer, expert, false);
    if (cache.last_refusal() != AdmitRefusal::kPrice) continue;
    const double value = cache.values(layer)[size_t(expert)];
    if (!decision.rejection || value > decision.rejection->value) decision.rejection = {expert, value, d};
  }
}

void ExpertMarket::admit(Devices& devices, LayerDecision& decision) {
  if (!is_open_) return;
  const int layer = decision.layer;
  for (const ExpertDecision& e : decision.experts) {
    // Experts that a device read directly from host memory are misses like the CPU's.
    const bool missed = (e.where == Placement::kCpu || (e.where == Placement::kFetched && e.slot < 0)) &&
                        !devices.holds(layer, e.expert);
    if (!missed && e.where != Placement::kHit) continue;
    const Offer offer = best_offer(layer, e, devices);
    if (offer.device >= 0) {
      take(layer, e.expert, offer, devices, decision);
    } else if (missed) {
      note_refusal(layer, e.expert, devices, decision);
    }
  }
}

void preload_by_usage(const LayerPlanner& planner, std::span<const double> usage, Devices& devices) {
  const CacheConfig& config = devices.cache(0).config();
  const size_t experts = size_t(config.num_experts), layers = size_t(config.num_layers);
  const size_t num_devices = size_t(devices.count());
  std::vector<int> order(layers * experts);
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> uses(order.size(), 0.0), used(layers, 0.0);  // per event; per layer in all
  if (!usage.empty()) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return usage[size_t(a)] > usage[size_t(b)]; });
    for (size_t cell = 0; cell < usage.size(); ++cell) used[cell / experts] += usage[cell];
    for (size_t cell = 0; cell < usage.size(); ++cell)
      uses[cell] = usage[cell] * config.top_k / std::max(used[cell / experts], 1e-300);
  }
  // Expected time of the experts that each device has of a layer. An expert goes where the layer ends first if it is
  // used: at x + g, after the experts that are expected beside it.
  std::vector<double> busy_us(layers * num_devices, 0.0);
  for (int cell : order) {
    const size_t layer = size_t(cell) / experts;
    int best = -1;
    double best_us = std::numeric_limits<double>::infinity();
    for (int d = 0; d < devices.count(); ++d) {
      const DeviceCost& cost = planner.cost(int(layer)).device(d);
      const double us = cost.exchange_us() + cost.profile().gpu_launch_us +
                        busy_us[layer * num_devices + size_t(d)] + cost.gpu_expert_us(1);
      if (us >= best_us || devices.cache(d).free_slots(int(layer)).empty()) continue;
      best = d;
      best_us = us;
    }
    if (best < 0 || !devices.cache(best).preload(int(layer), cell % config.num_experts)) continue;
    busy_us[layer * num_devices + size_t(best)] +=
        uses[size_t(cell)] * planner.cost(int(layer)).device(best).gpu_expert_us(1);
  }
}

}  // namespace twofold
