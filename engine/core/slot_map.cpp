#include "twofold/slot_map.h"

#include <stdexcept>
#include <utility>

#include "twofold/reject.h"

namespace twofold {

void CacheConfig::check(int layer, int expert, const char* operation) const {
  if (layer < 0 || layer >= num_layers || expert < 0 || expert >= num_experts) {
    throw std::invalid_argument(std::string("expert cache: ") + operation + " of layer " +
                                std::to_string(layer) + ", expert " + std::to_string(expert) +
                                " given, layers 0 ... " + std::to_string(num_layers - 1) +
                                " and experts 0 ... " + std::to_string(num_experts - 1) + " expected");
  }
}

SlotMap::SlotMap(CacheConfig config) : config_(std::move(config)), pooled_(config_.pooled()) {
  config_.validate();
  const size_t layers = static_cast<size_t>(config_.num_layers);
  const size_t cells = layers * static_cast<size_t>(config_.num_experts);
  int num_slots = 0, num_pinned = 0;
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    num_slots += config_.slots_per_layer[static_cast<size_t>(layer)];
    if (config_.pin(layer) == LayerPin::kResident) num_pinned += config_.num_experts;
  }
  if (num_slots < num_pinned) {
    reject("expert cache: slots_per_layer", std::to_string(num_slots) + " in all",
           "at least the " + std::to_string(num_pinned) + " of the layers that are pinned,");
  }
  occupant_.assign(static_cast<size_t>(num_slots), -1);
  free_.resize(pooled_ ? 1 : layers);
  int slot = num_slots;
  for (int layer = config_.num_layers; layer-- > 0;) {
    for (int n = 0; n < config_.slots_per_layer[static_cast<size_t>(layer)]; ++n)
      free_[pool_of(layer)].push_back(--slot);
  }
  num_held_.assign(layers, 0);
  num_changes_.assign(layers, 0);
  slot_of_.assign(cells, -1);
  state_.assign(cells, ExpertState::kAbsent);
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

void SlotMap::vacate(size_t cell) {
  const int layer = static_cast<int>(cell) / config_.num_experts;
  occupant_[static_cast<size_t>(slot_of_[cell])] = -1;
  slot_of_[cell] = -1;
  state_[cell] = ExpertState::kAbsent;
  --num_held_[static_cast<size_t>(layer)];
  ++num_changes_[static_cast<size_t>(layer)];
}

void SlotMap::occupy(int slot, size_t cell, ExpertState state) {
  const int layer = static_cast<int>(cell) / config_.num_experts;
  occupant_[static_cast<size_t>(slot)] = static_cast<int>(cell);
  slot_of_[cell] = slot;
  state_[cell] = state;
  ++num_held_[static_cast<size_t>(layer)];
  ++num_changes_[static_cast<size_t>(layer)];
}

void SlotMap::take(int layer, int expert, const Admission& admission) {
  if (admission.evicted >= 0) {
    vacate(index(admission.evicted_layer, admission.evicted));
  } else {
    free_[pool_of(layer)].pop_back();
  }
  occupy(admission.slot, index(layer, expert), ExpertState::kInFlight);
}

size_t SlotMap::cell_in_flight(int slot, const char* operation) const {
  const int cell = slot >= 0 && slot < num_slots() ? occupant_[static_cast<size_t>(slot)] : -1;
  if (cell < 0 || state_[static_cast<size_t>(cell)] != ExpertState::kInFlight) {
    throw std::invalid_argument(std::string("expert cache: ") + operation + " of slot " +
                                std::to_string(slot) + " given, a slot with an upload in flight expected");
  }
  return static_cast<size_t>(cell);
}

void SlotMap::publish(int slot) {
  const size_t cell = cell_in_flight(slot, "publish");
  state_[cell] = ExpertState::kResident;
  ++num_changes_[cell / static_cast<size_t>(config_.num_experts)];
}

void SlotMap::cancel(int slot) {
  const size_t cell = cell_in_flight(slot, "cancel");
  vacate(cell);
  free_[pool_of(static_cast<int>(cell) / config_.num_experts)].push_back(slot);
}

bool SlotMap::preload(int layer, int expert) {
  config_.check(layer, expert, "preload");
  if (slot_of(layer, expert) >= 0 || config_.pin(layer) == LayerPin::kNever) return false;
  auto& free = free_[pool_of(layer)];
  if (free.empty()) return false;
  const int slot = free.back();
  free.pop_back();
  occupy(slot, index(layer, expert), ExpertState::kResident);
  return true;
}

void SlotMap::evict(int layer, int expert) {
  config_.check(layer, expert, "eviction");
  if (!is_resident(layer, expert)) {
    throw std::invalid_argument("expert cache: eviction of layer " + std::to_string(layer) + ", expert " +
                                std::to_string(expert) + " given, a resident one expected");
  }
  const int slot = slot_of(layer, expert);
  vacate(index(layer, expert));
  free_[pool_of(layer)].push_back(slot);
}

}  // namespace twofold
