// What a cache policy is: it watches routing and puts a number on every expert. Slots, states and victims are
// ExpertCache's business. A policy sees each event once and whole, before anyone asks it for a decision.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace twofold {

struct CacheConfig;

// One layer's routing in one step.
struct RoutingEvent {
  int layer = 0;
  int num_tokens = 0;
  int top_k = 0;
  bool prefill = false;  // prompt tokens: says much about usage, little about what the next step needs
  std::span<const int32_t> ids;    // [num_tokens * top_k]
  std::span<const float> weights;  // the same shape, or empty where unknown
  std::span<const int> active;     // distinct experts, ascending
  std::span<const int> loads;      // tokens of each active expert
};

class CachePolicy {
 public:
  virtual ~CachePolicy() = default;
  virtual void observe(const RoutingEvent& event) = 0;
  // Worth of every expert of the layer, higher is kept longer; out has num_experts entries.
  virtual void values(int layer, std::span<double> out) const = 0;
  // May `expert` (a miss of the current event) take a slot? victim < 0: a free slot.
  virtual bool admits(int layer, int expert, double value, int victim, double victim_value) const = 0;
  virtual void on_admit(int /*layer*/, int /*expert*/) {}
  virtual void on_evict(int /*layer*/, int /*expert*/) {}
  // An expert bids for a slot: who would go (victim < 0: a free slot) and what that one is worth. Comes
  // before the decision and only with decisions that count, not with questions.
  virtual void on_bid(int /*layer*/, int /*victim*/, double /*victim_value*/) {}
  // A new text begins (request boundary) in this share (0 ... 1) of the running requests: nothing to do for
  // most.
  virtual void on_boundary(double /*share*/) {}
  // Offline policies are told the future: per layer, the active experts of every event to come.
  virtual void set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer);
  // Everything learned, for a warm start; empty if there is nothing to keep.
  virtual std::vector<double> state() const { return {}; }
  virtual void restore(std::span<const double> state);
};

using MakeCachePolicy = std::unique_ptr<CachePolicy>(const CacheConfig&);

// What a policy's values allow where the next layer's experts can be foreseen.
enum class Prefetching : uint8_t {
  kAuto,   // values are misses saved, which an upload ahead can be weighed against: prefetched by itself
  kAsked,  // values are a score without a unit, they only rank: prefetched where asked for
  kNever,  // nothing moves once the slots are full
};

// All that is known of a policy outside the file it is written in.
struct CachePolicyEntry {
  const char* name;
  MakeCachePolicy* make;
  bool offline;  // needs set_future, so it cannot serve
  bool pooled;   // made for one pool of slots for all layers; else for fixed slots per layer
  Prefetching prefetches;
  const char* help;
};

// The first is the one to take where nothing is said; offline ones come last.
std::span<const CachePolicyEntry> cache_policies();
// By name; throws std::invalid_argument listing the valid ones.
const CachePolicyEntry& cache_policy(const std::string& name);

}  // namespace twofold
