// Room for experts in device memory: slots assigned by the cache, then staging slots that fetched experts pass
// through. All have one size, that of the largest expert.
#pragma once
#include <cstddef>

#include "device/device_memory.h"
#include "host/page_memory.h"

namespace twofold {

// From one slot to the next, in bytes.
constexpr size_t slot_stride(size_t largest_expert_bytes) {
  return round_up(largest_expert_bytes, kDeviceAlignment);
}

class SlotPool {
 public:
  // Throws DeviceOutOfMemory naming the flags to lower.
  SlotPool(DeviceApi& api, int num_slots, int num_staging, size_t largest_expert_bytes);

  std::byte* slot(int index) const { return memory_.data() + size_t(index) * stride_; }
  int num_slots() const { return num_slots_; }
  int num_staging() const { return num_staging_; }
  size_t stride() const { return stride_; }
  size_t bytes() const { return memory_.bytes(); }

 private:
  int num_slots_, num_staging_;
  size_t stride_;
  DeviceMemory memory_;
};

}  // namespace twofold
