// Tracks which experts are in which slots. One object for all layers; not thread-safe (the engine thread owns
// it).
//
// A step, per layer:
//   cache.observe(layer, ids, weights, num_tokens);     // the whole layer's routing, before any decision
//   hits = routed experts with is_resident(layer, e)
//   for each miss to fetch now:   cache.admit(layer, e, true)    // forced: the demand upload needs a slot
//   for each other miss:          cache.admit(layer, e, false)   // worth an upload?
// When an upload is visible (a step boundary): cache.publish(slot).
// Experts routed in their layer's latest event and experts in flight are never victims. In a shared pool a
// victim may belong to another layer (Admission::evicted_layer); no layer drops below top_k slots while there
// are enough slots for all.
#pragma once

#include <cstdint>
#include <memory>
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
  std::vector<double>
      prior_usage;  // [layers * experts], from a warm start or a training trace; required by `static`

  LayerPin pin(int layer) const { return pins.empty() ? LayerPin::kFree : pins[static_cast<size_t>(layer)]; }
  bool pooled() const { return shared_pool.value_or(cache_policy(policy).pooled); }
  void validate() const;  // throws std::invalid_argument naming field, value and expectation
};

// Even spread of num_slots over layers, remainder to the first ones; never more than num_experts in one. Pinned
// layers come first: all their experts, or none. Throws std::invalid_argument where the resident ones do not fit.
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

// Why the last can_admit/admit refused.
enum class AdmitRefusal : uint8_t { kNone = 0, kPresent = 1, kNoVictim = 2, kPrice = 3 };

class ExpertCache {
 public:
  static std::unique_ptr<ExpertCache> make(CacheConfig config);

  const CacheConfig& config() const { return config_; }
  int num_slots() const { return num_slots_; }
  int slot_offset(int layer) const { return offsets_[static_cast<size_t>(layer)]; }

  // Slots that the layer holds now; with a shared pool they move between layers.
  int num_held(int layer) const { return num_held_[static_cast<size_t>(layer)]; }

  // Global slot id, -1 while absent. An expert in flight has a slot too: check is_resident before running from
  // it.
  int slot_of(int layer, int expert) const { return slot_of_[index(layer, expert)]; }
  ExpertState state(int layer, int expert) const { return state_[index(layer, expert)]; }
  bool is_resident(int layer, int expert) const { return state(layer, expert) == ExpertState::kResident; }
  // layer * num_experts + expert in that slot, -1 if free.
  int occupant(int slot) const { return occupant_[static_cast<size_t>(slot)]; }

  // ids[num_tokens * top_k]; weights the same shape or empty. Throws std::invalid_argument on ids out of
  // range.
  void observe(int layer, std::span<const int32_t> ids, std::span<const float> weights, int num_tokens,
               bool prefill = false);
  // The same for a step that mixes prompt and generated tokens: prefill_rows[t] != 0 marks prompt tokens. The
  // policy learns from each kind separately; the event is their union.
  void observe_mixed(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                     std::span<const uint8_t> prefill_rows);
  // Distinct experts of the layer's last observed event, ascending, and the tokens of each.
  std::span<const int> active(int layer) const;
  std::span<const int> loads(int layer) const;

  // What admit would do; nothing changes. Empty if the expert is present already, no slot can be freed, or (not
  // forced) the policy values the upload below its price; last_refusal gives the reason.
  std::optional<Admission> can_admit(int layer, int expert, bool forced);
  std::optional<Admission> admit(int layer, int expert, bool forced);
  // Highest value first; equal values keep their order.
  void sort_by_value(int layer, std::vector<int>& experts);
  AdmitRefusal last_refusal() const { return last_refusal_; }

  void publish(int slot);  // in flight -> resident
  // Announces the layer's predicted next event: until it is observed, these experts are protected from eviction
  // instead of the last event's.
  void expect(int layer, std::span<const int> experts);
  // Takes a slot for an expert ahead of its event, in flight from now on; the caller has weighed can_admit's
  // answer. Unlike admit it is not reported to the policy as a bid, because the prediction may be wrong.
  std::optional<Admission> reserve(int layer, int expert);
  const CachePolicyEntry& policy() const { return entry_; }
  void cancel(int slot);  // in flight -> absent: an upload that was withdrawn
  // Puts an expert into a free slot at once, resident; false if the layer has none or it is present.
  bool preload(int layer, int expert);
  // resident -> absent: frees the slot. Throws std::invalid_argument if the expert is not resident.
  void evict(int layer, int expert);
  int num_free(int layer) const { return static_cast<int>(free_[pool_of(layer)].size()); }
  // Fills free slots at start: the most used experts by prior_usage, lowest numbers where nothing is known.
  // Returns what was placed as layer * num_experts + expert.
  std::vector<int> preload_by_usage();

  // Before a step in which num_new of num_running requests begin.
  void boundary(int num_new = 1, int num_running = 1);
  double value(int layer, int expert);  // current lambda * V
  // The same for all experts of a layer, read-only: out[num_experts].
  void values(int layer, std::span<double> out) const {
    check(layer, 0, "values");
    policy_->values(layer, out);
  }
  void set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer);

  // Warm start: learned state, usage and the resident experts. load() checks shape and policy and throws
  // std::runtime_error with the actual and expected values; it returns the experts to upload (layer *
  // num_experts + expert), best first, and changes no slot.
  // held: [layers * experts], what the file names as resident where slots are spread over several caches.
  void save(const std::string& path, std::span<const uint8_t> held = {}) const;
  std::vector<int> load(const std::string& path);

 private:
  explicit ExpertCache(CacheConfig config);
  size_t index(int layer, int expert) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(config_.num_experts) +
           static_cast<size_t>(expert);
  }
  void collect_active(int layer, std::span<const int32_t> ids, std::vector<int>& active,
                      std::vector<int>& loads);
  const std::vector<double>& layer_values(int layer);
  int find_free(int layer) const;
  size_t pool_of(int layer) const { return pooled_ ? 0 : static_cast<size_t>(layer); }
  // The cell whose upload into this slot is in flight; throws std::invalid_argument if there is none.
  size_t cell_in_flight(int slot, const char* operation) const;
  void vacate(size_t cell);
  void occupy(int slot, size_t cell, ExpertState state);
  // The resident with the lowest value in the layer that is not routed now; cell -1 if there is none.
  struct Victim {
    int cell = -1;
    double value = 0;
    bool fresh = false;
  };
  const Victim& layer_victim(int layer);
  Victim find_victim(int layer);
  std::optional<Admission> decide(int layer, int expert, bool forced, bool bid);
  std::optional<Admission> refuse(AdmitRefusal why);
  void take(int layer, int expert, const Admission& admission);
  void check(int layer, int expert, const char* operation) const;

  CacheConfig config_;
  const CachePolicyEntry& entry_;
  std::unique_ptr<CachePolicy> policy_;
  int num_slots_ = 0;
  std::vector<int> offsets_;  // [layers + 1]
  std::vector<int> occupant_;
  bool pooled_ = false;
  int floor_ = 0;                       // in a pool: slots that other layers must leave a layer
  std::vector<std::vector<int>> free_;  // per pool, the next one last
  std::vector<int> num_held_;
  std::vector<Victim> victims_;
  std::vector<int32_t> slot_of_;
  std::vector<ExpertState> state_;
  std::vector<uint8_t> routed_now_;
  std::vector<std::vector<int>> active_, loads_;
  std::vector<std::vector<double>> values_;
  std::vector<uint8_t> values_fresh_;
  std::vector<double> usage_;
  std::vector<int> scratch_;
  AdmitRefusal last_refusal_ = AdmitRefusal::kNone;
};

}  // namespace twofold
