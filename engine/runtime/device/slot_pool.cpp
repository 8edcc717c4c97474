#include "device/slot_pool.h"

#include <algorithm>
#include <string>

namespace twofold {

SlotPool::SlotPool(DeviceApi& api, int num_slots, int num_staging, size_t largest_expert_bytes)
    : num_slots_(num_slots),
      num_staging_(num_staging),
      stride_(slot_stride(largest_expert_bytes)),
      memory_(
          api, std::max<size_t>(size_t(num_slots) + size_t(num_staging), 1) * stride_,
          std::to_string(num_slots) + " expert slots and " + std::to_string(num_staging) + " staging slots",
          "lower --gpu-experts-ratio, --num-gpu-experts or --gpu-memory-utilization") {}

}  // namespace twofold
