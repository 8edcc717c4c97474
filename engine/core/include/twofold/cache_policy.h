// A cache policy watches routing and gives every expert a value. Slots, states and victims belong to
// ExpertCache. A policy sees each event once, complete, before it is asked for a decision.
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
  bool prefill = false;          // prompt tokens: tell much about usage, little about the next step's experts
  std::span<const int32_t> ids;  // [num_tokens * top_k]
  std::span<const float> weights;  // the same shape, or empty where unknown
  std::span<const int> active;     // distinct experts, ascending
  std::span<const int> loads;      // tokens of each active expert
};

class CachePolicy {
 public:
  virtual ~CachePolicy() = default;
  virtual void observe(const RoutingEvent& event) = 0;
  // Value of every expert of the layer; a higher value is kept longer. out has num_experts entries.
  virtual void values(int layer, std::span<double> out) const = 0;
  // May `expert` (a miss of the current event) take a slot? victim < 0: a free slot.
  virtual bool admits(int layer, int expert, double value, int victim, double victim_value) const = 0;
  // An expert bids for a slot: its victim (victim < 0: a free slot) and the victim's value. Called before a
  // decision that will be carried out, not for queries.
  virtual void on_bid(int /*layer*/, int /*victim*/, double /*victim_value*/) {}
  // A new request begins in this share (0 ... 1) of the running requests. Most policies ignore it.
  virtual void on_boundary(double /*share*/) {}
  // Gives an offline policy the future: per layer, the active experts of every coming event.
  virtual void set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer);
  // Learned state for a warm start; empty if there is nothing to save.
  virtual std::vector<double> state() const { return {}; }
  virtual void restore(std::span<const double> state);
};

using MakeCachePolicy = std::unique_ptr<CachePolicy>(const CacheConfig&);

// Whether a policy's values allow prefetching for the next layer.
enum class Prefetching : uint8_t {
  kAuto,       // values are misses saved, comparable to the price of an upload: prefetch on by default
  kOnRequest,  // values are scores without a unit that only rank: prefetch only on request
  kNever,      // nothing moves once the slots are full
};

// Registry entry of a policy.
struct CachePolicyEntry {
  const char* name;
  MakeCachePolicy* make;
  bool offline;  // needs set_future, so it cannot serve
  bool pooled;   // designed for one pool of slots for all layers; else for fixed slots per layer
  Prefetching prefetches;
  const char* help;
};

// The first entry is the default; offline policies come last.
std::span<const CachePolicyEntry> cache_policies();
// By name; throws std::invalid_argument listing the valid ones.
const CachePolicyEntry& cache_policy(const std::string& name);

}  // namespace twofold
