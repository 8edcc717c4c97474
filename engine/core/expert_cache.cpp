#include "twofold/expert_cache.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "twofold/reject.h"

namespace twofold {
ExpertCache::ExpertCache(CacheConfig given)
    : SlotMap(std::move(given)),
      entry_(cache_policy(config().policy)),
      policy_(entry_.make(config())),
      pooled_(config().pooled()) {
  const size_t layers = static_cast<size_t>(config().num_layers);
  const size_t cells = layers * static_cast<size_t>(config().num_experts);
  int num_free_layers = 0, free_slots = num_slots();
  for (int layer = 0; layer < config().num_layers; ++layer) {
    num_free_layers += config().pin(layer) == LayerPin::kFree;
    if (config().pin(layer) == LayerPin::kResident) free_slots -= config().num_experts;
  }
  floor_ = free_slots >= num_free_layers * config().top_k ? config().top_k : 0;
  victims_.resize(layers);
  routed_now_.assign(cells, 0);
  active_.resize(layers);
  loads_.resize(layers);
  values_.assign(layers, std::vector<double>(static_cast<size_t>(config().num_experts)));
  values_fresh_.assign(layers, 0);
  usage_.assign(cells, 0);
  scratch_.assign(static_cast<size_t>(config().num_experts), 0);
}

void ExpertCache::observe(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                          int num_tokens, bool prefill) {
  config().check(layer, 0, "observe");
  if (num_tokens < 0 || ids.size() != static_cast<size_t>(num_tokens) * static_cast<size_t>(config().top_k) ||
      (!weights.empty() && weights.size() != ids.size())) {
    throw std::invalid_argument("expert cache: observe got " + std::to_string(ids.size()) + " ids and " +
                                std::to_string(weights.size()) +
                                " weights, num_tokens * top_k = " + std::to_string(num_tokens) + " * " +
                                std::to_string(config().top_k) + " expected");
  }
  const auto& active = active_[static_cast<size_t>(layer)];
  for (int expert : active) routed_now_[index(layer, expert)] = 0;
  collect_active(layer, ids);
  for (int expert : active) {
    routed_now_[index(layer, expert)] = 1;
    usage_[index(layer, expert)] += 1;
  }
  policy_->observe(RoutingEvent{layer, num_tokens, config().top_k, prefill, ids, weights, active,
                                loads_[static_cast<size_t>(layer)]});
  values_fresh_[static_cast<size_t>(layer)] = 0;
  victims_[static_cast<size_t>(layer)].fresh = false;
}

void ExpertCache::collect_active(int layer, std::span<const int32_t> ids) {
  auto& active = active_[static_cast<size_t>(layer)];
  auto& loads = loads_[static_cast<size_t>(layer)];
  active.clear();
  loads.clear();
  for (int32_t id : ids) {
    if (id < 0 || id >= config().num_experts) config().check(layer, id, "routing");
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
  const auto k = static_cast<size_t>(config().top_k);
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
  collect_active(layer, ids);
  for (int expert : active(layer)) routed_now_[index(layer, expert)] = 1;
  victims_[static_cast<size_t>(layer)].fresh = false;
}

const std::vector<double>& ExpertCache::values(int layer) {
  config().check(layer, 0, "values");
  auto& values = values_[static_cast<size_t>(layer)];
  if (!values_fresh_[static_cast<size_t>(layer)]) {
    policy_->values(layer, values);
    values_fresh_[static_cast<size_t>(layer)] = 1;
  }
  return values;
}

const ExpertCache::Victim& ExpertCache::layer_victim(int layer) {
  Victim& victim = victims_[static_cast<size_t>(layer)];
  if (victim.fresh && victim.num_changes == num_changes(layer)) return victim;
  const std::vector<double>& values = this->values(layer);
  victim = {-1, std::numeric_limits<double>::infinity(), true, num_changes(layer)};
  if (config().pin(layer) != LayerPin::kFree) return victim;
  // The least value first, then who has it: without a branch on residency, which follows no pattern, and without
  // a chain from one comparison to the next (512 experts: 13 instead of 22 % of a simulation).
  constexpr double kNever = std::numeric_limits<double>::infinity();
  constexpr size_t kChains = 4;
  const auto first = static_cast<size_t>(index(layer, 0));
  constexpr std::array<double, 2> kAdded{0, kNever};  // a choice would become a branch
  const auto value_of = [&](size_t expert) {
    const size_t cell = first + expert;
    return values[expert] +
           kAdded[static_cast<size_t>((state_[cell] != ExpertState::kResident) | (routed_now_[cell] != 0))];
  };
  std::array<double, kChains> least;
  least.fill(kNever);
  size_t expert = 0;
  for (; expert + kChains <= values.size(); expert += kChains)
    for (size_t chain = 0; chain < kChains; ++chain)
      least[chain] = std::min(least[chain], value_of(expert + chain));
  for (; expert < values.size(); ++expert) least[0] = std::min(least[0], value_of(expert));
  victim.value = *std::min_element(least.begin(), least.end());
  if (victim.value == kNever) return victim;
  size_t found = 0;
  while (value_of(found) != victim.value) ++found;
  victim.cell = static_cast<int>(first + found);
  return victim;
}

ExpertCache::Victim ExpertCache::find_victim(int layer) {
  Victim best = layer_victim(layer);
  if (!pooled_) return best;
  for (int other = 0; other < config().num_layers; ++other) {
    if (other == layer || num_held(other) <= floor_) continue;
    const Victim& victim = layer_victim(other);
    if (victim.cell >= 0 && victim.value < best.value) best = victim;
  }
  return best;
}

std::optional<Admission> ExpertCache::can_admit(int layer, int expert, bool forced, bool is_bid) {
  config().check(layer, expert, "admission");
  const auto refuse = [this](AdmitRefusal why) {
    last_refusal_ = why;
    return std::nullopt;
  };
  if (slot_of(layer, expert) >= 0) return refuse(AdmitRefusal::kPresent);
  if (config().pin(layer) == LayerPin::kNever) return refuse(AdmitRefusal::kNoVictim);
  Admission admission;
  admission.value = values(layer)[static_cast<size_t>(expert)];
  const auto free = free_slots(layer);
  int victim = -1;
  if (!free.empty()) {
    admission.slot = free.back();
  } else {
    const Victim found = find_victim(layer);
    if (found.cell < 0) return refuse(AdmitRefusal::kNoVictim);
    admission.victim_value = found.value;
    admission.evicted = found.cell % config().num_experts;
    admission.evicted_layer = found.cell / config().num_experts;
    admission.slot = slot_of(admission.evicted_layer, admission.evicted);
    victim = admission.evicted;
  }
  if (is_bid) policy_->on_bid(layer, victim, admission.victim_value);
  if (!forced && !policy_->admits(layer, expert, admission.value, victim, admission.victim_value)) {
    return refuse(AdmitRefusal::kPrice);
  }
  last_refusal_ = AdmitRefusal::kNone;
  return admission;
}

void ExpertCache::boundary(int num_new, int num_running) {
  if (num_new < 0 || num_running < 1 || num_new > num_running) {
    reject("expert cache: num_new, num_running", std::to_string(num_new) + ", " + std::to_string(num_running),
           "0 <= num_new <= num_running, num_running >= 1");
  }
  if (num_new > 0) policy_->on_boundary(static_cast<double>(num_new) / num_running);
}

std::optional<Admission> ExpertCache::admit(int layer, int expert, bool forced, bool is_bid) {
  const std::optional<Admission> admission = can_admit(layer, expert, forced, is_bid);
  if (admission) take(layer, expert, *admission);
  return admission;
}

void ExpertCache::expect(int layer, std::span<const int> experts) {
  for (int expert : experts) config().check(layer, expert, "prediction");
  auto& active = active_[static_cast<size_t>(layer)];
  for (int expert : active) routed_now_[index(layer, expert)] = 0;
  active.assign(experts.begin(), experts.end());
  std::sort(active.begin(), active.end());
  loads_[static_cast<size_t>(layer)].assign(active.size(), 0);
  for (int expert : active) routed_now_[index(layer, expert)] = 1;
  victims_[static_cast<size_t>(layer)].fresh = false;
}

void ExpertCache::set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer) {
  if (events_per_layer.size() != static_cast<size_t>(config().num_layers)) {
    reject("expert cache: future", std::to_string(events_per_layer.size()) + " layers",
           std::to_string(config().num_layers));
  }
  policy_->set_future(events_per_layer);
}

std::vector<int> preload_by_usage(SlotMap& slots) {
  const CacheConfig& config = slots.config();
  std::vector<int> order(static_cast<size_t>(config.num_layers) * static_cast<size_t>(config.num_experts));
  std::iota(order.begin(), order.end(), 0);
  if (!config.prior_usage.empty()) {
    std::stable_sort(order.begin(), order.end(), [&config](int a, int b) {
      return config.prior_usage[static_cast<size_t>(a)] > config.prior_usage[static_cast<size_t>(b)];
    });
  }
  std::vector<int> placed;
  for (int cell : order) {
    if (slots.preload(cell / config.num_experts, cell % config.num_experts)) placed.push_back(cell);
  }
  return placed;
}

}  // namespace twofold
