// Counters of decisions by name, sums since the start. A counter is declared here alone: the struct's member, its name
// in Python and in the engine's statistics, and its gauge follow.
#pragma once

#include <cstdint>

namespace twofold {

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

// X(name, meaning): steps with prompt tokens by outcome of their dynamic update, and the experts moved.
#define TWOFOLD_DYNAMIC_UPDATE_COUNTS(X)                              \
  X(updated, "experts were moved")                                    \
  X(unchanged, "the experts that the prompt uses most were resident") \
  X(too_short, "fewer prompt tokens than the threshold")              \
  X(experts, "experts moved")

#define TWOFOLD_COUNT_MEMBER(name, meaning) int64_t name = 0;

struct PrefetchCounts {
  TWOFOLD_PREFETCH_COUNTS(TWOFOLD_COUNT_MEMBER)
};
struct DynamicUpdateCounts {
  TWOFOLD_DYNAMIC_UPDATE_COUNTS(TWOFOLD_COUNT_MEMBER)
};

}  // namespace twofold
