// Which experts are in which slots of one device. Knows slots, not values: ExpertCache decides what enters
// and what leaves. A cell is layer * num_experts + expert.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "twofold/cache_policy.h"

namespace twofold {

// Restricts a layer's placement, overriding the policy.
enum class LayerPin : uint8_t {
  kFree = 0,      // the policy decides
  kNever = 1,     // none is ever in a slot
  kResident = 2,  // all are resident from the beginning, none is ever a victim
};

struct CacheConfig {
  int num_layers = 0;
  int num_experts = 0;
  int top_k = 0;
  std::vector<int> slots_per_layer;  // see spread_slots
  std::vector<LayerPin> pins;        // one per layer, or none: all are free
  std::string policy = "payback";
  double upload_price = 0.67;  // price of one upload, in misses (default_upload_price)
  // One pool of slots for all layers (any layer may take any slot), or fixed slots per layer. Unset: the
  // policy's default.
  std::optional<bool> shared_pool;
  // [layers * experts], from a warm start or a training trace; required by `static`.
  std::vector<double> prior_usage;

  LayerPin pin(int layer) const { return pins.empty() ? LayerPin::kFree : pins[static_cast<size_t>(layer)]; }
  bool pooled() const { return shared_pool.value_or(cache_policy(policy).pooled); }
  void validate() const;  // throws std::invalid_argument naming field, value and expectation
  // Throws std::invalid_argument where there is no such expert.
  void check(int layer, int expert, const char* operation) const;
};

// Even spread of num_slots over layers, remainder to the first ones; never more than num_experts in one.
// Pinned layers come first: all their experts, or none. Throws std::invalid_argument where the resident ones
// do not fit.
std::vector<int> spread_slots(int num_slots, int num_layers, int num_experts,
                              std::span<const LayerPin> pins = {});

enum class ExpertState : uint8_t { kAbsent = 0, kInFlight = 1, kResident = 2 };

struct Admission {
  int slot = -1;
  int evicted = -1;         // expert that left the slot, -1 if it was free
  int evicted_layer = -1;   // its layer; differs from the admitting layer only in a shared pool
  double value = 0;         // lambda * V of the admitted expert
  double victim_value = 0;  // 0 for a free slot
};

class SlotMap {
 public:
  // The experts of pinned layers are resident. Throws std::invalid_argument where they do not fit, and as validate.
  explicit SlotMap(CacheConfig config);

  const CacheConfig& config() const { return config_; }
  int num_slots() const { return static_cast<int>(occupant_.size()); }
  // Slots that the layer holds now; with a shared pool they move between layers.
  int num_held(int layer) const { return num_held_[static_cast<size_t>(layer)]; }
  // Free slots that the layer may take, the next one last.
  std::span<const int> free_slots(int layer) const { return free_[pool_of(layer)]; }

  // Global slot id, -1 while absent. An expert in flight has a slot too: check is_resident before running
  // from it.
  int slot_of(int layer, int expert) const { return slot_of_[index(layer, expert)]; }
  ExpertState state(int layer, int expert) const { return state_[index(layer, expert)]; }
  bool is_resident(int layer, int expert) const { return state(layer, expert) == ExpertState::kResident; }
  // Cell in that slot, -1 if free.
  int occupant(int slot) const { return occupant_[static_cast<size_t>(slot)]; }

  void publish(int slot);  // in flight -> resident
  void cancel(int slot);   // in flight -> absent: an upload that was withdrawn
  // Puts an expert into a free slot at once, resident; false if the layer has none or it is present.
  bool preload(int layer, int expert);
  // resident -> absent: frees the slot. Throws std::invalid_argument if the expert is not resident.
  void evict(int layer, int expert);

 protected:
  size_t index(int layer, int expert) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(config_.num_experts) +
           static_cast<size_t>(expert);
  }
  // In flight from now on, in the admission's slot, which its expert leaves or which was free.
  void take(int layer, int expert, const Admission& admission);
  // Rises with every change of the layer's cells.
  uint32_t num_changes(int layer) const { return num_changes_[static_cast<size_t>(layer)]; }

  std::vector<ExpertState> state_;  // per cell

 private:
  size_t pool_of(int layer) const { return pooled_ ? 0 : static_cast<size_t>(layer); }
  // The cell whose upload into this slot is in flight; throws std::invalid_argument if there is none.
  size_t cell_in_flight(int slot, const char* operation) const;
  void vacate(size_t cell);
  void occupy(int slot, size_t cell, ExpertState state);

  CacheConfig config_;
  bool pooled_;
  std::vector<int> occupant_;
  std::vector<std::vector<int>> free_;  // per pool, the next one last
  std::vector<int> num_held_;
  std::vector<uint32_t> num_changes_;
  std::vector<int32_t> slot_of_;
};

}  // namespace twofold
