// What the device may read from which slot: for each layer and expert the slot or -1, in device memory at an
// address that never changes, so that a captured graph can hold it.
//
// A table step is one whose layers are placed by the device itself, from this table (a replayed graph does).
// The invariant that makes it safe while experts come and go:
//
//   1. The table is fixed from begin_step to the step's end on the device. It is replaced in the compute
//      stream's order, so no step sees two tables.
//   2. It names only experts whose copies have completed without error and into whose slots nothing was
//      queued since: exactly the residents of the cache at that moment.
//   3. From begin_step on, until layer v of that step has read, no copy begins into a slot that the table
//      assigns to an expert of layer v, even if the cache has reassigned the slot meanwhile. Such
//      an upload waits (UploadEngine asks awaits_reader) until the step has passed that layer, or has
//      ended.
//
//   4. Beside the table a layer may read experts that landed since, if each is reported to the device
//      (Mailbox::arrive, after its copy has ended); rule 3 holds for their slots from then on.
//
// So whatever an upload's timing, a layer that reads slot table[v][e] finds the bytes of expert e of layer v.
// The cache may evict an expert of a later layer in the middle of a step: that layer still hits it.
#pragma once
#include <cstdint>
#include <vector>

#include "device/device_memory.h"
#include "twofold/expert_cache.h"

namespace twofold {

class SlotTables {
 public:
  SlotTables(DeviceApi& api, int num_layers, int num_experts, int num_slots);
  ~SlotTables();

  // Publishes the cache's residents to all later work on `compute`, and begins a table step.
  void begin_step(const ExpertCache& cache, StreamHandle compute);
  // The device has placed this layer: earlier layers have read their slots, this one may be reading.
  void reached(int layer);
  // Reports an expert that landed in a slot that no remaining layer reads; the layer may read it there in this
  // step.
  void arrived(int layer, int slot) { reader_[size_t(slot)] = layer; }
  // Ends the step. The caller orders the device's remaining work of the step before later copies.
  void end_step();

  // int32 [layers][experts], at a constant address.
  const std::byte* device() const { return device_.data(); }
  // As last published.
  int slot(int layer, int expert) const {
    return published_[size_t(layer) * size_t(num_experts_) + size_t(expert)];
  }
  // Whether a layer of the current table step may still read this slot.
  bool awaits_reader(int slot) const {
    return in_step_ && size_t(slot) < reader_.size() && reader_[size_t(slot)] >= reached_;
  }

 private:
  DeviceApi& api_;
  int num_experts_;
  bool in_step_ = false;
  int reached_ = -1;
  bool any_published_ = false;
  int next_copy_ = 0;  // index of the next host copy: the device may still be reading the other one
  std::vector<int32_t> published_;  // [layers * experts]
  std::vector<int> reader_;         // [slots] layer that the published table gives the slot to, -1: none
  DeviceMemory device_;
  PinnedMemory host_;
  EventPool events_;
  EventHandle copied_[2];
  bool copying_[2] = {false, false};
};

}  // namespace twofold
