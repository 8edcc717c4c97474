// Where a routed pair is computed, one byte per pair ([pairs] `where`): written by the device, carried by the
// mailbox. A number of Placement, or kPadding.
#pragma once
#include <twofold/placement.h>

#include <cstdint>

namespace twofold::cuda {

#define TWOFOLD_PLACEMENT_BYTE(place, name) inline constexpr uint8_t place = uint8_t(Placement::place);
TWOFOLD_PLACEMENTS(TWOFOLD_PLACEMENT_BYTE)
#undef TWOFOLD_PLACEMENT_BYTE
inline constexpr uint8_t kPadding = kNumPlacements;  // a row of padding

}  // namespace twofold::cuda
