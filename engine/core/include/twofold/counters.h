// Counters of decisions by name, sums since the start. A counter is declared here alone: the struct's member, its name
// and meaning in Python, in the engine's statistics, in its gauge's help and in docs/reference/scheduler.md follow.
#pragma once

#include <cstdint>

namespace twofold {

// X(name, meaning), over tokens and layers.
#define TWOFOLD_PLACEMENT_COUNTS(X)                                   \
  X(hits, "routed experts that were in VRAM")                         \
  X(cpu_misses, "routed experts that the CPU computed")               \
  X(fetched, "routed experts uploaded for the step that needed them") \
  X(uploads, "experts copied from host memory to VRAM")               \
  X(evictions, "experts evicted from their slot")                     \
  X(h2d_bytes, "bytes of experts copied to VRAM")                     \
  X(deferred, "routed experts of the CPU deferred to the next MoE layer (--num-deferred-experts)")

// X(name, meaning), in experts per layer and step. issued = used + late + wasted + in flight; precision = correct /
// predicted; recall on misses = foreseen / misses.
#define TWOFOLD_PREFETCH_COUNTS(X)                                                            \
  X(predicted, "among the top-k of a prediction")                                             \
  X(correct, "predicted and routed")                                                          \
  X(misses, "routed, and neither in a slot nor under way when their layer was predicted")     \
  X(foreseen, "misses that were predicted")                                                   \
  X(issued, "uploads queued")                                                                 \
  X(used, "routed and landed in time: hits that would have been misses")                      \
  X(late, "routed, and still in flight when their layer began")                               \
  X(wasted, "not routed by the layer they were uploaded for; later steps may still use them") \
  X(dropped, "worth an upload that could not have landed in time")

// X(name, meaning), in steps with prompt tokens.
#define TWOFOLD_DYNAMIC_UPDATE_COUNTS(X)                                      \
  X(updated, "experts were replaced according to the prompt's routing")       \
  X(unchanged, "the experts that the prompt uses most were in slots already") \
  X(too_few_tokens, "the step had fewer prompt tokens than --gpu-prefill-token-threshold")

// X(group, counters, what is counted): of an executor, and of its layer scheduler.
#define TWOFOLD_EXECUTOR_GROUPS(X) \
  X(placement, TWOFOLD_PLACEMENT_COUNTS, "where routed experts ran, and what was copied")
#define TWOFOLD_SCHEDULER_GROUPS(X)                                                  \
  X(prefetch, TWOFOLD_PREFETCH_COUNTS, "experts of prefetching, per layer and step") \
  X(dynamic_update, TWOFOLD_DYNAMIC_UPDATE_COUNTS,                                   \
    "steps with prompt tokens by outcome of the dynamic update")

#define TWOFOLD_COUNT_MEMBER(name, meaning) int64_t name = 0;
struct PlacementCounts {
  TWOFOLD_PLACEMENT_COUNTS(TWOFOLD_COUNT_MEMBER)
};
struct PrefetchCounts {
  TWOFOLD_PREFETCH_COUNTS(TWOFOLD_COUNT_MEMBER)
};
struct DynamicUpdateCounts {
  TWOFOLD_DYNAMIC_UPDATE_COUNTS(TWOFOLD_COUNT_MEMBER)
};
#undef TWOFOLD_COUNT_MEMBER

// What a layer scheduler counts.
struct SchedulerCounts {
  PrefetchCounts prefetch;
  DynamicUpdateCounts dynamic_update;
};

}  // namespace twofold
