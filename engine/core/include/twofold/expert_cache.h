// Decides which experts are in which slots. One object for all layers; not thread-safe (the engine thread owns
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

#include "twofold/slot_map.h"

namespace twofold {

// Why the last can_admit/admit refused.
enum class AdmitRefusal : uint8_t { kNone = 0, kPresent = 1, kNoVictim = 2, kPrice = 3 };

class ExpertCache : public SlotMap {
 public:
  explicit ExpertCache(CacheConfig config);

  // ids[num_tokens * top_k]; weights the same shape or empty. Throws std::invalid_argument on ids out of
  // range.
  void observe(int layer, std::span<const int32_t> ids, std::span<const float> weights, int num_tokens,
               bool prefill = false);
  // The same for a step that mixes prompt and generated tokens: prefill_rows[t] != 0 marks prompt tokens. The
  // policy learns from each kind separately; the event is their union.
  void observe_mixed(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                     std::span<const uint8_t> prefill_rows);
  // Announces the layer's predicted next event: until it is observed, these experts are protected from
  // eviction instead of the last event's.
  void expect(int layer, std::span<const int> experts);
  // Distinct experts of the layer's last observed event, ascending, and the tokens of each.
  std::span<const int> active(int layer) const { return active_[static_cast<size_t>(layer)]; }
  std::span<const int> loads(int layer) const { return loads_[static_cast<size_t>(layer)]; }

  // What admit would do; nothing changes. Empty if the expert is present already, no slot can be freed, or (not
  // forced) the policy values the upload below its price; last_refusal gives the reason. is_bid: report the bid to
  // the policy.
  std::optional<Admission> can_admit(int layer, int expert, bool forced, bool is_bid = false);
  // Takes the slot, in flight from now on. An admission ahead of the expert's event is no bid, because the
  // prediction may be wrong.
  std::optional<Admission> admit(int layer, int expert, bool forced, bool is_bid = true);
  AdmitRefusal last_refusal() const { return last_refusal_; }

  // Before a step in which num_new of num_running requests begin.
  void boundary(int num_new = 1, int num_running = 1);
  // Current lambda * V of the layer's experts, kept until its next observe.
  const std::vector<double>& values(int layer);
  // The same for all experts of a layer, read-only: out[num_experts].
  void values(int layer, std::span<double> out) const {
    config().check(layer, 0, "values");
    policy_->values(layer, out);
  }
  const CachePolicyEntry& policy() const { return entry_; }
  void set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer);

  // Warm start: learned state, usage and the resident experts. load() checks shape and policy and throws
  // std::runtime_error with the actual and expected values; it returns the experts to upload (cells), best
  // first, and changes no slot. held: [layers * experts], what the file names as resident where several
  // caches share the slots.
  void save(const std::string& path, std::span<const uint8_t> held = {}) const;
  std::vector<int> load(const std::string& path);

 private:
  // Fills active and loads of the layer.
  void collect_active(int layer, std::span<const int32_t> ids);
  // The resident with the lowest value in the layer that is not routed now; cell -1 if there is none.
  struct Victim {
    int cell = -1;
    double value = 0;
    bool fresh = false;
    uint32_t num_changes = 0;  // SlotMap::num_changes when it was found
  };
  const Victim& layer_victim(int layer);
  Victim find_victim(int layer);

  const CachePolicyEntry& entry_;
  std::unique_ptr<CachePolicy> policy_;
  bool pooled_ = false;
  int floor_ = 0;  // in a pool: slots that other layers must leave a layer
  std::vector<Victim> victims_;
  std::vector<uint8_t> routed_now_;
  std::vector<std::vector<int>> active_, loads_;
  std::vector<std::vector<double>> values_;
  std::vector<uint8_t> values_fresh_;
  std::vector<double> usage_;
  std::vector<int> scratch_;
  AdmitRefusal last_refusal_ = AdmitRefusal::kNone;
};

// Fills free slots at start: the most used experts by prior_usage, lowest numbers where nothing is known.
// Returns the cells that were placed.
std::vector<int> preload_by_usage(SlotMap& slots);

}  // namespace twofold
