// Options of a layer scheduler. An option is declared here alone: the configuration's member, its check, its argument
// and default in Python, and its row in docs/reference/scheduler.md follow. `scheduler_option` in
// twofold/api/placement_config.py makes a flag of it.
#pragma once

#include <limits>

namespace twofold {

// Numbers that an option takes.
struct OptionRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
};
constexpr OptionRange any() { return {}; }
constexpr OptionRange at_least(double low) { return {.low = low}; }
constexpr OptionRange within(double low, double high) { return {low, high}; }

}  // namespace twofold

// clang-format off
// X(type, name, default, range, help). Those from fetch_rule on describe other engines for comparison, or fill slots.
#define TWOFOLD_SCHEDULER_OPTIONS(X)                                                                                  \
  X(std::string, policy, "payback", any(), "cache policy: which experts are in slots")                                \
  X(bool, prefetch, false, any(), "upload ahead the experts that the next layer's router predicts")                   \
  X(int, num_staging, -1, at_least(-1), "staging slots of each device; -1: num_experts, room for one whole layer")    \
  X(double, upload_price, -1, any(), "price of a background upload, in misses; negative: the contention it causes")   \
  X(int, max_waiting_uploads, 16, at_least(0), "maximum queued background uploads; keeps slots from idling in flight")\
  X(int, stream_ahead_from, 33, at_least(0), "tokens of a step from which the next layer is uploaded ahead; 0: never")\
  X(int, replace_from, 0, at_least(0),                                                                                \
    "prompt tokens of a step from which it replaces residents by its own routing, in the same pass; 0: never")        \
  X(int, num_deferred, 0, at_least(0), "maximum experts of a token deferred to the next MoE layer; changes outputs")  \
  X(double, cache_prior, 0, within(0, 0.9),                                                                           \
    "prefer resident experts: in decode, an expert in VRAM replaces one whose score is at most its own / (1 - N); "   \
    "changes outputs; 0.0 = off, up to 0.9 (docs/explanation/deferral.md)")                                           \
  X(FetchRule, fetch_rule, FetchRule::kBestSplit, any(), "how misses are chosen that a device fetches")               \
  X(bool, background_uploads, true, any(), "upload misses that the CPU ran after their layer, if they are worth it")  \
  X(bool, always_cache_fetched, false, any(), "a fetched expert always takes a slot, whatever its value")             \
  X(std::optional<bool>, shared_pool, std::nullopt, any(), "all layers share one pool of slots; none: as the policy") \
  X(bool, fixed_placement, false, any(), "slots keep their initial experts: misses never take one")                   \
  X(std::vector<double>, prior_usage, {}, any(), "uses [layers * experts] for policy static and the initial contents")\
  X(std::vector<LayerPin>, pins, {}, any(), "per layer: auto, cpu (never in a slot), gpu (always in one); empty: auto")\
  X(std::vector<int>, homes, {}, any(), "per layer, the device with its other weights; empty: device 0")
// clang-format on
