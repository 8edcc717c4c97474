#include "twofold/expert_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "twofold/reject.h"

namespace twofold {
std::unique_ptr<ExpertCache> ExpertCache::make(CacheConfig config) {
  config.validate();
  return std::unique_ptr<ExpertCache>(new ExpertCache(std::move(config)));
}

ExpertCache::ExpertCache(CacheConfig config)
    : config_(std::move(config)), entry_(cache_policy(config_.policy)), policy_(entry_.make(config_)) {
  const size_t layers = static_cast<size_t>(config_.num_layers);
  const size_t cells = layers * static_cast<size_t>(config_.num_experts);
  offsets_.assign(layers + 1, 0);
  std::partial_sum(config_.slots_per_layer.begin(), config_.slots_per_layer.end(), offsets_.begin() + 1);
  num_slots_ = offsets_.back();
  occupant_.assign(static_cast<size_t>(num_slots_), -1);
  pooled_ = config_.pooled();
  int num_free_layers = 0, free_slots = num_slots_;
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    num_free_layers += config_.pin(layer) == LayerPin::kFree;
    if (config_.pin(layer) == LayerPin::kResident) free_slots -= config_.num_experts;
  }
  if (free_slots < 0) {
    reject("expert cache: slots_per_layer", std::to_string(num_slots_) + " in all",
           "at least the " + std::to_string(num_slots_ - free_slots) + " of the layers that are pinned,");
  }
  floor_ = free_slots >= num_free_layers * config_.top_k ? config_.top_k : 0;
  free_.resize(pooled_ ? 1 : layers);
  for (int layer = config_.num_layers; layer-- > 0;) {
    for (int slot = offsets_[static_cast<size_t>(layer) + 1];
         slot-- > offsets_[static_cast<size_t>(layer)];) {
      free_[pool_of(layer)].push_back(slot);
    }
  }
  num_held_.assign(layers, 0);
  victims_.resize(layers);
  slot_of_.assign(cells, -1);
  state_.assign(cells, ExpertState::kAbsent);
  routed_now_.assign(cells, 0);
  active_.resize(layers);
  loads_.resize(layers);
  values_.assign(layers, std::vector<double>(static_cast<size_t>(config_.num_experts)));
  values_fresh_.assign(layers, 0);
  usage_.assign(cells, 0);
  scratch_.assign(static_cast<size_t>(config_.num_experts), 0);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (config_.pin(layer) != LayerPin::kResident) continue;
    for (int expert = 0; expert < config_.num_experts; ++expert) {
      if (!preload(layer, expert)) {
        reject("expert cache: slots_per_layer",
               std::to_string(config_.slots_per_layer[static_cast<size_t>(layer)]),
               "num_experts for layer " + std::to_string(layer) + ", which is pinned,");
      }
    }
  }
}

void ExpertCache::check(int layer, int expert, const char* operation) const {
  if (layer < 0 || layer >= config_.num_layers || expert < 0 || expert >= config_.num_experts) {
    throw std::invalid_argument(
        std::string("expert cache: ") + operation + " of layer " + std::to_string(layer) + ", expert " +
        std::to_string(expert) + " given, layers 0 ... " + std::to_string(config_.num_layers - 1) +
        " and experts 0 ... " + std::to_string(config_.num_experts - 1) + " expected");
  }
}

void ExpertCache::observe(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                          int num_tokens, bool prefill) {
  check(layer, 0, "observe");
  if (num_tokens < 0 || ids.size() != static_cast<size_t>(num_tokens) * static_cast<size_t>(config_.top_k) ||
      (!weights.empty() && weights.size() != ids.size())) {
    throw std::invalid_argument("expert cache: observe got " + std::to_string(ids.size()) + " ids and " +
                                std::to_string(weights.size()) +
                                " weights, num_tokens * top_k = " + std::to_string(num_tokens) + " * " +
                                std::to_string(config_.top_k) + " expected");
  }
  auto& active = active_[static_cast<size_t>(layer)];
  auto& loads = loads_[static_cast<size_t>(layer)];
  for (int expert : active) routed_now_[index(layer, expert)] = 0;
  collect_active(layer, ids, active, loads);
  for (int expert : active) {
    routed_now_[index(layer, expert)] = 1;
    usage_[index(layer, expert)] += 1;
  }
  policy_->observe(RoutingEvent{layer, num_tokens, config_.top_k, prefill, ids, weights, active, loads});
  values_fresh_[static_cast<size_t>(layer)] = 0;
  victims_[static_cast<size_t>(layer)].fresh = false;
}

void ExpertCache::collect_active(int layer, std::span<const int32_t> ids, std::vector<int>& active,
                                 std::vector<int>& loads) {
  active.clear();
  loads.clear();
  for (int32_t id : ids) {
    if (id < 0 || id >= config_.num_experts) check(layer, id, "routing");
  }
  for (int32_t id : ids) {
    if (scratch_[static_cast<size_t>(id)]++ == 0) active.push_back(id);
  }
  std::sort(active.begin(), active.end());
  for (int expert : active) loads.push_back(std::exchange(scratch_[static_cast<size_t>(expert)], 0));
}

void ExpertCache::observe_mixed(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                                std::span<const uint8_t> prefill_rows) {
  const int num_tokens = static_cast<int>(prefill_rows.size());
  const auto num_prefill =
      std::count_if(prefill_rows.begin(), prefill_rows.end(), [](uint8_t p) { return p != 0; });
  if (num_prefill == 0 || num_prefill == num_tokens) {
    observe(layer, ids, weights, num_tokens, num_prefill > 0);
    return;
  }
  // Prompt rows first, so that the decode rows leave the freshest mark; then the union is what is routed now.
  const auto k = static_cast<size_t>(config_.top_k);
  if (ids.size() != prefill_rows.size() * k)
    observe(layer, ids, weights, num_tokens, false);  // throws with the reason
  for (const bool prefill : {true, false}) {
    std::vector<int32_t> part_ids;
    std::vector<float> part_weights;
    for (size_t t = 0; t < prefill_rows.size(); ++t) {
      if ((prefill_rows[t] != 0) != prefill) continue;
      part_ids.insert(part_ids.end(), ids.begin() + t * k, ids.begin() + (t + 1) * k);
      if (!weights.empty())
        part_weights.insert(part_weights.end(), weights.begin() + t * k, weights.begin() + (t + 1) * k);
    }
    observe(layer, part_ids, part_weights, static_cast<int>(part_ids.size() / k), prefill);
  }
  auto& active = active_[static_cast<size_t>(layer)];
  collect_active(layer, ids, active, loads_[static_cast<size_t>(layer)]);
  for (int expert : active) routed_now_[index(layer, expert)] = 1;
  victims_[static_cast<size_t>(layer)].fresh = false;
}

std::span<const int> ExpertCache::active(int layer) const { return active_[static_cast<size_t>(layer)]; }
std::span<const int> ExpertCache::loads(int layer) const { return loads_[static_cast<size_t>(layer)]; }

const std::vector<double>& ExpertCache::layer_values(int layer) {
  auto& values = values_[static_cast<size_t>(layer)];
  if (!values_fresh_[static_cast<size_t>(layer)]) {
    policy_->values(layer, values);
    values_fresh_[static_cast<size_t>(layer)] = 1;
  }
  return values;
}

double ExpertCache::value(int layer, int expert) {
  check(layer, expert, "value");
  return layer_values(layer)[static_cast<size_t>(expert)];
}

int ExpertCache::find_free(int layer) const {
  const auto& free = free_[pool_of(layer)];
  return free.empty() ? -1 : free.back();
}

const ExpertCache::Victim& ExpertCache::layer_victim(int layer) {
  Victim& victim = victims_[static_cast<size_t>(layer)];
  if (victim.fresh) return victim;
  const std::vector<double>& values = layer_values(layer);
  victim = {-1, std::numeric_limits<double>::infinity(), true};
  if (config_.pin(layer) != LayerPin::kFree) return victim;
  const size_t first = index(layer, 0);
  for (size_t expert = 0; expert < values.size(); ++expert) {
    const size_t cell = first + expert;
    // No early exit: residency follows no pattern that branch prediction could learn.
    const bool free = (state_[cell] == ExpertState::kResident) & (routed_now_[cell] == 0);
    const bool less = free & (values[expert] < victim.value);
    victim.cell = less ? static_cast<int>(cell) : victim.cell;
    victim.value = less ? values[expert] : victim.value;
  }
  return victim;
}

ExpertCache::Victim ExpertCache::find_victim(int layer) {
  Victim best = layer_victim(layer);
  if (!pooled_) return best;
  for (int other = 0; other < config_.num_layers; ++other) {
    if (other == layer || num_held_[static_cast<size_t>(other)] <= floor_) continue;
    const Victim& victim = layer_victim(other);
    if (victim.cell >= 0 && victim.value < best.value) best = victim;
  }
  return best;
}

void ExpertCache::vacate(size_t cell) {
  const int layer = static_cast<int>(cell) / config_.num_experts;
  occupant_[static_cast<size_t>(slot_of_[cell])] = -1;
  slot_of_[cell] = -1;
  state_[cell] = ExpertState::kAbsent;
  --num_held_[static_cast<size_t>(layer)];
  victims_[static_cast<size_t>(layer)].fresh = false;
}

void ExpertCache::occupy(int slot, size_t cell, ExpertState state) {
  const int layer = static_cast<int>(cell) / config_.num_experts;
  occupant_[static_cast<size_t>(slot)] = static_cast<int>(cell);
  slot_of_[cell] = slot;
  state_[cell] = state;
  ++num_held_[static_cast<size_t>(layer)];
  victims_[static_cast<size_t>(layer)].fresh = false;
}

std::optional<Admission> ExpertCache::refuse(AdmitRefusal why) {
  last_refusal_ = why;
  return std::nullopt;
}

std::optional<Admission> ExpertCache::can_admit(int layer, int expert, bool forced) {
  return decide(layer, expert, forced, false);
}

void ExpertCache::boundary(int num_new, int num_running) {
  if (num_new < 0 || num_running < 1 || num_new > num_running) {
    reject("expert cache: num_new, num_running", std::to_string(num_new) + ", " + std::to_string(num_running),
           "0 <= num_new <= num_running, num_running >= 1");
  }
  if (num_new > 0) policy_->on_boundary(static_cast<double>(num_new) / num_running);
}

std::optional<Admission> ExpertCache::decide(int layer, int expert, bool forced, bool bid) {
  check(layer, expert, "admission");
  if (slot_of(layer, expert) >= 0) return refuse(AdmitRefusal::kPresent);
  if (config_.pin(layer) == LayerPin::kNever) return refuse(AdmitRefusal::kNoVictim);
  Admission admission;
  admission.value = layer_values(layer)[static_cast<size_t>(expert)];
  admission.slot = find_free(layer);
  int victim = -1;
  if (admission.slot < 0) {
    const Victim found = find_victim(layer);
    if (found.cell < 0) return refuse(AdmitRefusal::kNoVictim);
    admission.slot = slot_of_[static_cast<size_t>(found.cell)];
    admission.victim_value = found.value;
    admission.evicted = found.cell % config_.num_experts;
    admission.evicted_layer = found.cell / config_.num_experts;
    victim = admission.evicted;
  }
  if (bid) policy_->on_bid(layer, victim, admission.victim_value);
  if (!forced && !policy_->admits(layer, expert, admission.value, victim, admission.victim_value)) {
    return refuse(AdmitRefusal::kPrice);
  }
  last_refusal_ = AdmitRefusal::kNone;
  return admission;
}

std::optional<Admission> ExpertCache::admit(int layer, int expert, bool forced) {
  const std::optional<Admission> admission = decide(layer, expert, forced, true);
  if (admission) take(layer, expert, *admission);
  return admission;
}

std::optional<Admission> ExpertCache::reserve(int layer, int expert) {
  const std::optional<Admission> admission = decide(layer, expert, true, false);
  if (admission) take(layer, expert, *admission);
  return admission;
}

void ExpertCache::expect(int layer, std::span<const int> experts) {
  for (int expert : experts) check(layer, expert, "prediction");
  auto& active = active_[static_cast<size_t>(layer)];
  for (int expert : active) routed_now_[index(layer, expert)] = 0;
  active.assign(experts.begin(), experts.end());
  std::sort(active.begin(), active.end());
  loads_[static_cast<size_t>(layer)].assign(active.size(), 0);
  for (int expert : active) routed_now_[index(layer, expert)] = 1;
  victims_[static_cast<size_t>(layer)].fresh = false;
}

void ExpertCache::take(int layer, int expert, const Admission& admission) {
  if (admission.evicted >= 0) {
    vacate(index(admission.evicted_layer, admission.evicted));
  } else {
    free_[pool_of(layer)].pop_back();
  }
  occupy(admission.slot, index(layer, expert), ExpertState::kInFlight);
}

void ExpertCache::sort_by_value(int layer, std::vector<int>& experts) {
  const auto& values = layer_values(layer);
  std::stable_sort(experts.begin(), experts.end(), [&values](int a, int b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
}

size_t ExpertCache::cell_in_flight(int slot, const char* operation) const {
  const int cell = slot >= 0 && slot < num_slots_ ? occupant_[static_cast<size_t>(slot)] : -1;
  if (cell < 0 || state_[static_cast<size_t>(cell)] != ExpertState::kInFlight) {
    throw std::invalid_argument(std::string("expert cache: ") + operation + " of slot " +
                                std::to_string(slot) + " given, a slot with an upload in flight expected");
  }
  return static_cast<size_t>(cell);
}

void ExpertCache::publish(int slot) {
  const size_t cell = cell_in_flight(slot, "publish");
  state_[cell] = ExpertState::kResident;
  victims_[cell / static_cast<size_t>(config_.num_experts)].fresh = false;
}

void ExpertCache::cancel(int slot) {
  const size_t cell = cell_in_flight(slot, "cancel");
  vacate(cell);
  free_[pool_of(static_cast<int>(cell) / config_.num_experts)].push_back(slot);
}

bool ExpertCache::preload(int layer, int expert) {
  check(layer, expert, "preload");
  if (slot_of(layer, expert) >= 0 || config_.pin(layer) == LayerPin::kNever) return false;
  const int slot = find_free(layer);
  if (slot < 0) return false;
  free_[pool_of(layer)].pop_back();
  occupy(slot, index(layer, expert), ExpertState::kResident);
  return true;
}

void ExpertCache::evict(int layer, int expert) {
  check(layer, expert, "eviction");
  if (!is_resident(layer, expert)) {
    throw std::invalid_argument("expert cache: eviction of layer " + std::to_string(layer) + ", expert " +
                                std::to_string(expert) + " given, a resident one expected");
  }
  const int slot = slot_of(layer, expert);
  vacate(index(layer, expert));
  free_[pool_of(layer)].push_back(slot);
}

std::vector<int> ExpertCache::preload_by_usage() {
  std::vector<int> order(slot_of_.size());
  std::iota(order.begin(), order.end(), 0);
  if (!config_.prior_usage.empty()) {
    std::stable_sort(order.begin(), order.end(), [this](int a, int b) {
      return config_.prior_usage[static_cast<size_t>(a)] > config_.prior_usage[static_cast<size_t>(b)];
    });
  }
  std::vector<int> placed;
  for (int cell : order) {
    if (preload(cell / config_.num_experts, cell % config_.num_experts)) placed.push_back(cell);
  }
  return placed;
}

void ExpertCache::set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer) {
  if (events_per_layer.size() != static_cast<size_t>(config_.num_layers)) {
    reject("expert cache: future", std::to_string(events_per_layer.size()) + " layers",
           std::to_string(config_.num_layers));
  }
  policy_->set_future(events_per_layer);
}

}  // namespace twofold
