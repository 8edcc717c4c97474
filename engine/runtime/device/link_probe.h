// Measures the link to a device: plain copies, as the ceiling, and the upload engine beside them. No model runs
// meanwhile; a probe owns its stream, so that others may compute.
#pragma once
#include <cstddef>
#include <memory>

#include "device/device_memory.h"
#include "moe/expert_store.h"

namespace twofold {

class LinkProbe {
 public:
  // Allocates twice most_bytes on the device and as much pinned memory. Throws DeviceError, DeviceOutOfMemory.
  LinkProbe(std::shared_ptr<DeviceApi> api, size_t most_bytes);

  // The device's time for `count` copies that travel in one call, pinned to device. Waits for them; `asleep`
  // sleeps while waiting, so that no core is taken from concurrent compute threads. The copies read and write
  // different memory in turn. Throws std::invalid_argument on more bytes than were allocated.
  double copies_us(size_t bytes, int count, bool asleep);

 private:
  static constexpr size_t kParts = 2;
  std::shared_ptr<DeviceApi> api_;
  size_t most_bytes_;
  DeviceMemory target_;
  PinnedMemory source_;
  Stream stream_;
  EventPool events_;
  EventHandle begin_, end_;
  size_t next_ = 0;
};

struct UploadProbe {
  size_t bytes = 0;
  double us = 0;       // host clock, from the first upload's issue to the last one's landing
  double busy_us = 0;  // time the link was busy, measured by the device
  int batches = 0;
  bool pinned = false;
};

// The upload engine copies the store's experts into the given slots, one after the other, and again until
// `num_uploads` have landed; all of them in the demand lane, or all in the background lane.
UploadProbe probe_uploads(DeviceApi& api, const ExpertStore& store, int num_uploads, bool demand);

}  // namespace twofold
