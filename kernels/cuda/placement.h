// Where a routed pair is computed, one byte each ([pairs] `where`): written by the device, carried by the
// mailbox. The first three are engine/core's Placement, which telemetry stores; kernels do not include it, so
// whoever joins the two checks that they agree (engine/runtime/device/table_step.cpp).
#pragma once
#include <cstdint>

namespace twofold::cuda {

inline constexpr uint8_t kHit = 0;      // on the device, from its slot
inline constexpr uint8_t kCpu = 1;      // by the host
inline constexpr uint8_t kFetched = 2;  // on the device, which reads the host's store
inline constexpr uint8_t kNobody = 3;   // a row of padding

}  // namespace twofold::cuda
