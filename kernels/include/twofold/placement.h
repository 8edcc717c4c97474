// Where a routed expert runs. The scheduler decides it, devices and events carry it as a byte, and telemetry stores
// the numbers, which must not change: a new place comes last. Declared here alone; Python's enumeration follows.
#pragma once
#include <cstdint>

namespace twofold {

// X(place, name in Python).
#define TWOFOLD_PLACEMENTS(X)                        \
  X(kHit, "HIT")         /* a device, from a slot */ \
  X(kCpu, "CPU")         /* the host */              \
  X(kFetched, "FETCHED") /* a device, which got or reads a copy for it */

#define TWOFOLD_PLACEMENT_MEMBER(place, name) place,
enum class Placement : uint8_t { TWOFOLD_PLACEMENTS(TWOFOLD_PLACEMENT_MEMBER) };
#undef TWOFOLD_PLACEMENT_MEMBER

#define TWOFOLD_COUNT_PLACEMENT(place, name) +1
inline constexpr int kNumPlacements = TWOFOLD_PLACEMENTS(TWOFOLD_COUNT_PLACEMENT);
#undef TWOFOLD_COUNT_PLACEMENT

}  // namespace twofold
