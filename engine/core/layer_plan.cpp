// How the scheduler plans a layer: which misses are fetched, into which slots, and what is deferred.
#include <algorithm>
#include <utility>

#include "twofold/layer_scheduler.h"

namespace twofold {

void LayerScheduler::plan(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                          int num_tokens) {
  const auto active = cache_->active(layer);
  const auto loads = cache_->loads(layer);
  std::vector<int>& fetch = devices_.front().fetch;
  const bool never = cache_->config().pin(layer) == LayerPin::kNever;  // not through a staging slot either
  std::vector<ExpertLoad> plannable;
  std::vector<int> misses;  // indices into decision_.experts that may be fetched
  int hits = 0;
  for (size_t i = 0; i < active.size(); ++i) {
    const ExpertState state = cache_->state(layer, active[i]);
    const bool resident = state == ExpertState::kResident;
    decision_.experts.push_back({active[i], loads[i], resident ? Placement::kHit : Placement::kCpu,
                                 resident ? cache_->slot_of(layer, active[i]) : -1});
    hits += resident;
    if (state == ExpertState::kAbsent && !never) misses.push_back(int(i));
    // An expert in flight is not usable and not fetched twice: it runs on the CPU, outside the plan.
    if (state != ExpertState::kInFlight && !never) plannable.push_back({active[i], loads[i], resident});
  }
  // An accelerator without slots still streams; one without room at all leaves everything to the CPU.
  const int room = num_staging();
  if (config_.fetch_rule != FetchRule::kBestSplit) {
    plan_as_peer(layer, plannable, room);
    return;
  }
  if (num_tokens == 1) {
    // Interchangeable for this layer; for the next tokens the more valuable ones are the better ones to have.
    std::stable_sort(misses.begin(), misses.end(), [&](int a, int b) {
      return cache_->value(layer, decision_.experts[size_t(a)].expert) >
             cache_->value(layer, decision_.experts[size_t(b)].expert);
    });
    int count = deferral_.most() > 0
                    ? split_deferring(layer, ids, weights, misses)
                    : decode_planner_.split(hits, static_cast<int>(misses.size()), link_.backlog_us());
    count = std::min(count, room);
    fetch.assign(misses.begin(), misses.begin() + count);
    return;
  }
  plan_many(layer, plannable, room);
}

int LayerScheduler::split_deferring(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                                    std::span<const int> misses) {
  on_cpu_.assign(ids.size(), 1);
  const auto deferrable =
      deferral_.choose(layer, weights, static_cast<int>(ids.size()), shape_.generated_rows, on_cpu_);
  const auto is_deferrable = [&](const ExpertDecision& e) {
    const auto pair = std::find(ids.begin(), ids.end(), e.expert) - ids.begin();
    return !deferrable.empty() && deferrable[static_cast<size_t>(pair)] != 0;
  };
  int hits = 0, now = 0, later = 0;
  for (const ExpertDecision& e : decision_.experts)
    ++(e.where == Placement::kHit ? hits : is_deferrable(e) ? later : now);
  ones_.resize(ids.size(), 1);
  const auto loads = [this](size_t count) { return std::span<const int>(ones_.data(), count); };
  size_t best = 0;
  double least = 0;
  for (size_t fetched = 0; fetched <= misses.size(); ++fetched) {
    if (fetched > 0)
      --(is_deferrable(decision_.experts[static_cast<size_t>(misses[fetched - 1])]) ? later : now);
    const LayerTimes times =
        cost_.layer({loads(static_cast<size_t>(hits)), loads(fetched), loads(static_cast<size_t>(now)),
                     link_.backlog_us(), link_.queued_us(), false, loads(static_cast<size_t>(later)),
                     std::max(0.0, cpu_free_us_ - link_.now_us())});
    const double us = times.layer_us + std::max(0.0, times.cpu_end_us - times.layer_us - gap_us_);
    if (fetched > 0 && us >= least) continue;
    best = fetched;
    least = us;
  }
  return static_cast<int>(best);
}

void LayerScheduler::plan_many(int layer, std::span<const ExpertLoad> plannable, int room) {
  const auto active = cache_->active(layer);
  const auto index_of = [active](int expert) {
    return size_t(std::lower_bound(active.begin(), active.end(), expert) - active.begin());
  };
  const auto is_ahead = [this](const ExpertLoad& load) {
    return ahead_ && !load.resident && ahead_->find(load.expert) != nullptr;
  };
  const double backlog_us = link_.backlog_us(), queued_us = link_.queued_us();
  PrefillPlan plan;
  if (std::none_of(plannable.begin(), plannable.end(), is_ahead)) {
    if (ahead_) ahead_->discard();
    plan = prefill_planner_.plan(plannable, backlog_us, queued_us, room);
  } else {
    // Experts uploaded ahead are used, unless the layer is faster without them.
    std::vector<ExpertLoad> with(plannable.begin(), plannable.end());
    int num_ahead = 0;
    for (ExpertLoad& load : with) {
      if (!is_ahead(load)) continue;
      load.resident = true;
      ++num_ahead;
    }
    plan = prefill_planner_.plan(with, backlog_us, queued_us, room - num_ahead);
    PrefillPlan without = prefill_planner_.plan(plannable, backlog_us, queued_us, room);
    if (without.times.layer_us < plan.times.layer_us * (1 - 1e-12)) {
      plan = std::move(without);
      ahead_->discard();
    }
  }
  if (ahead_) {
    for (const StreamAhead::Expert& ahead : ahead_->held()) {
      const size_t i = index_of(ahead.what.expert);
      if (i >= active.size() || active[i] != ahead.what.expert) continue;  // no token was routed to it
      ExpertDecision& e = decision_.experts[i];
      if (cache_->state(layer, e.expert) != ExpertState::kAbsent) continue;
      e.where = Placement::kFetched;
      e.slot = ahead.what.slot;
      e.landed = ahead.landed;
    }
  }
  devices_.front().one_transfer = plan.streamed;
  for (int expert : plan.fetch) devices_.front().fetch.push_back(int(index_of(expert)));
}

void LayerScheduler::plan_as_peer(int layer, std::span<const ExpertLoad> plannable, int room) {
  const auto active = cache_->active(layer);
  std::vector<int>& fetch = devices_.front().fetch;
  for (int expert : peer_fetches(config_.fetch_rule, cost_, plannable, link_.backlog_us())) {
    if (static_cast<int>(fetch.size()) >= room) return;
    fetch.push_back(
        static_cast<int>(std::lower_bound(active.begin(), active.end(), expert) - active.begin()));
  }
}

void LayerScheduler::defer(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                           int num_tokens) {
  on_cpu_.assign(ids.size(), 0);
  expert_loads_.assign(size_t(cache_->config().num_experts), 0);
  for (const ExpertDecision& e : decision_.experts)
    expert_loads_[size_t(e.expert)] = e.where == Placement::kCpu;
  for (size_t pair = 0; pair < ids.size(); ++pair)
    on_cpu_[pair] = static_cast<uint8_t>(expert_loads_[size_t(ids[pair])]);
  decision_.deferred = deferral_.choose(layer, weights, static_cast<int>(ids.size()) / num_tokens,
                                        shape_.generated_rows, on_cpu_);
  if (decision_.deferred.empty()) return;
  expert_loads_.assign(expert_loads_.size(), 0);
  for (size_t pair = 0; pair < ids.size(); ++pair)
    expert_loads_[size_t(ids[pair])] += decision_.deferred[pair];
  cpu_loads_.clear();
  for (const ExpertDecision& e : decision_.experts) {
    if (e.where != Placement::kCpu) continue;
    const int later = expert_loads_[size_t(e.expert)];
    if (later > 0) deferred_loads_.push_back(later);
    if (e.tokens > later) cpu_loads_.push_back(e.tokens - later);
  }
}

// Whether that staging slot holds, or will hold, an expert of this layer.
bool LayerScheduler::stages(int device, int staging_slot) const {
  const int slot = num_slots(device) + staging_slot;
  return std::any_of(decision_.experts.begin(), decision_.experts.end(),
                     [&](const ExpertDecision& e) { return e.slot == slot && e.device == device; });
}

void LayerScheduler::place_fetched(int layer) {
  for (int d = 0; d < num_devices(); ++d) {
    ExpertCache& cache = this->cache(d);
    int staged = -1;
    for (int i : devices_[size_t(d)].fetch) {
      ExpertDecision& e = decision_.experts[size_t(i)];
      Move move;
      move.layer = layer;
      move.expert = e.expert;
      move.device = d;
      const auto possible = cache.can_admit(layer, e.expert, true);
      auto admission = dynamic_update_.admit(layer, e.expert, cache);
      if (!admission && keeps_fetched(layer, e.expert, d, possible))
        admission = cache.admit(layer, e.expert, true);
      if (admission) {
        move.take(*admission);
      } else {
        do {
          ++staged;
        } while (stages(d, staged));
        move.slot = num_slots(d) + staged;
        move.staged = true;
        move.value = possible ? possible->value : 0;
        move.victim_value = possible ? possible->victim_value : 0;
      }
      e.where = Placement::kFetched;
      e.slot = move.slot;
      e.device = d;
      decision_.moves.push_back(move);
    }
  }
}

// Whether a fetched expert stays in a slot. One that another device holds only passes through.
bool LayerScheduler::keeps_fetched(int layer, int expert, int device,
                                   const std::optional<Admission>& possible) const {
  if (config_.fixed_placement || !possible || is_held_elsewhere(layer, expert, device)) return false;
  return config_.always_cache_fetched || possible->evicted < 0 || possible->value > possible->victim_value;
}

}  // namespace twofold
