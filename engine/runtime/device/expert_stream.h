// Experts of the store that pass through two staging slots of a device, in order: one travels while the device reads the
// one before it. For work that visits an expert once and then leaves it, as training does.
#pragma once
#include <deque>
#include <memory>

#include "device/upload_engine.h"
#include "moe/expert_store.h"

namespace twofold {

class ExpertStream {
 public:
  // Pins the store where it can. link_latency_us, link_bandwidth_gbps: by the machine's profile.
  ExpertStream(std::shared_ptr<DeviceApi> api, const ExpertStore& store, double link_latency_us,
               double link_bandwidth_gbps);

  // Begins an upload. Throws std::logic_error where both slots are taken.
  void begin(int layer, int expert);
  // The panels, in device memory, of the expert that was begun first. Work given to `compute` from now on runs after all
  // uploads begun so far. Throws DeviceError if its upload failed.
  FfnPanels enter(StreamHandle compute);
  // `compute` has been given all that reads the expert entered last: its slot is free after that.
  void leave(StreamHandle compute);
  // Formats and offsets of the expert entered last.
  const ExpertLayout& layout() const;
  const ExpertStore& store() const { return store_; }
  size_t device_bytes() const { return slots_.bytes(); }
  bool pinned() const { return range_.pinned(); }

 private:
  static constexpr int kSlots = 2;

  std::shared_ptr<DeviceApi> api_;
  const ExpertStore& store_;
  PinnedRange range_;
  SlotPool slots_;
  SlotTables tables_;
  UploadEngine uploads_;
  std::deque<Transfer> begun_;  // the first one may have been entered
  bool entered_ = false;
  int next_slot_ = 0;
};

}  // namespace twofold
