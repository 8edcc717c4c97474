// Where a routed pair is computed, one byte per pair ([pairs] `where`): written by the device, carried by the
// mailbox. The first three equal engine/core's Placement, which telemetry stores. Kernels do not include it;
// engine/runtime/device/table_step.cpp includes both and checks that they agree.
#pragma once
#include <cstdint>

namespace twofold::cuda {

inline constexpr uint8_t kHit = 0;      // on the device, from its slot
inline constexpr uint8_t kCpu = 1;      // by the host
inline constexpr uint8_t kFetched = 2;  // on the device, which reads the host's store
inline constexpr uint8_t kNobody = 3;   // a row of padding

}  // namespace twofold::cuda
