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
//      gives to an expert of layer v, even if the cache has given the slot to somebody else meanwhile. Such
//      an upload waits (UploadEngine asks awaits_reader) until the step has come past that layer, or has
//      ended.
//
//   4. Beside the table a layer may read experts that landed since, where the device is told of them one by
//      one (Mailbox::arrive, after their copies have ended); rule 3 holds for their slots from then on.
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

  // Publishes the cache's residents to what `compute` is given from now on, and begins a table step.
  void begin_step(const ExpertCache& cache, StreamHandle compute);
  // The device has placed this layer: earlier layers have read their slots, this one may be reading.
  void reached(int layer);
  // An expert has landed in a slot that no layer still to come reads, and the layer may read it there in this step.
  void arrived(int layer, int slot) { reader_[size_t(slot)] = layer; }
  // What the device is still to do of the step is ordered before later copies by the caller.
  void end_step();

  // int32 [layers][experts], the same address for ever.
  const std::byte* device() const { return device_.data(); }
  // As published last.
  int slot(int layer, int expert) const {
    return published_[size_t(layer) * size_t(num_experts_) + size_t(expert)];
  }
  // Whether a layer of the table step under way may yet read this slot.
  bool awaits_reader(int slot) const {
    return in_step_ && size_t(slot) < reader_.size() && reader_[size_t(slot)] >= reached_;
  }

 private:
  DeviceApi& api_;
  int num_experts_;
  bool in_step_ = false;
  int reached_ = -1;
  bool any_published_ = false;
  int turn_ = 0;                    // of the two host copies: the device may still be reading the other one
  std::vector<int32_t> published_;  // [layers * experts]
  std::vector<int> reader_;         // [slots] layer that the published table gives the slot to, -1: none
  DeviceMemory device_;
  PinnedMemory host_;
  EventPool events_;
  EventHandle copied_[2];
  bool copying_[2] = {false, false};
};

}  // namespace twofold
