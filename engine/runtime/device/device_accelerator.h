// The accelerator on devices in real time. The scheduler decides, upload engines copy, and a slot is used once its
// device reports that its copy has completed. Each device has slots and a link of its own.
//
// Two kinds of steps. In a step placed by the host (prefill, eager decode) each layer calls place(), and the
// caller that launches its kernels calls before_compute and after_compute around them. In a table step (a
// replayed graph) the device places its layers itself, from the tables published by begin_table_step; the host
// then follows with the placements that the device reports. Table steps are for one device.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/device_memory.h"
#include "device/slot_pool.h"
#include "device/slot_tables.h"
#include "device/upload_engine.h"
#include "moe/slotted_accelerator.h"

namespace twofold {

// A device's slots and what fills them: the store as this device reads it, and its link.
struct DeviceSlots {
  // start_us: see UploadSettings; equal for all devices of a machine, which share a clock.
  DeviceSlots(std::shared_ptr<DeviceApi> device_api, const ExpertStore& store, const CostModel& cost,
              const LayerSchedulerConfig& config, int device, double start_us);

  // Order of destruction: uploads wait for their copies before slots and store are freed.
  std::shared_ptr<DeviceApi> api;
  PinnedRange store_range;
  SlotPool slots;
  SlotTables tables;
  UploadEngine uploads;
  double applied_correction = 1;  // the link's, in the scheduler's cost model
};

class DeviceAccelerator final : public SlottedAccelerator {
 public:
  // apis: one for each device of the cost model. Throws DeviceError, DeviceOutOfMemory.
  DeviceAccelerator(std::span<const std::shared_ptr<DeviceApi>> apis, const ExpertStore& store,
                    CostModel cost, LayerSchedulerConfig config);

  void begin_step(const StepRows& rows) override;
  void dense(int, int) override {}
  double virtual_now_us() const override { return -1; }
  // All devices together.
  size_t device_bytes() const override;
  kernels::Rounding rounding() const override { return kernels::Rounding::kOfDevice; }
  void host_computes() override;
  void end_step() override;

  // Brackets a device's kernels of a layer that place() placed, on their stream: kernels that read the layer's
  // fetched experts come after before_compute, all of them before after_compute.
  void before_compute(StreamHandle compute, int device = 0);
  void after_compute(StreamHandle compute, int device = 0);

  void begin_table_step(StreamHandle compute);
  // Follows a layer that the device has placed: where[num_tokens * top_k]. Returns the times predicted for it.
  LayerTimes follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                    std::span<const Placement> where) override;
  // For routers with one layer of lookahead: the layer has been placed, and the next one's router returned
  // logits[num_tokens * num_experts]. Begins the uploads that pay, before the device waits for the layer's
  // misses.
  void look_ahead(int layer, const LayerRouting& routing, std::span<const Placement> where,
                  std::span<const float> logits);
  // The device is about to place the layer: returns what it may now read beside its table. Valid until the next
  // call.
  std::span<const Publication> settle_ahead(int layer);
  // All kernels of the step have been queued on the stream.
  void end_table_step(StreamHandle compute);

  // The first device's.
  const SlotTables& tables() const { return first().tables; }
  const SlotPool& slots() const { return first().slots; }
  // Device address of the host's store, null if it is not pinned; offsets are those of the store.
  const std::byte* store_on_device() const { return first().store_range.device_address(); }
  // Why something is slower than it could be; "" if nothing is.
  const std::string& warning() const { return first().store_range.warning(); }
  const UploadEngine& uploads(int device = 0) const { return devices_[size_t(device)]->uploads; }
  // [hits][misses] of one-token layers, by the current cost model.
  std::vector<uint8_t> split_table() { return scheduler_.split_table(); }
  // cuda::ReadPrices for layers of several tokens, word by word; no direct reads under another engine's fetch
  // rule.
  std::vector<uint32_t> read_prices() const;
  const LayerScheduler& scheduler() const override { return scheduler_; }

 private:
  LayerScheduler& scheduler() override { return scheduler_; }
  const std::byte* slot(int device, int index) const override {
    return devices_[size_t(device)]->slots.slot(index);
  }
  void fill(int device, const Transfer& what) override { devices_[size_t(device)]->uploads.fill(what); }
  void decided(const LayerDecision& decision, std::span<GroupPlacement> placements) override;
  DeviceSlots& first() { return *devices_.front(); }
  const DeviceSlots& first() const { return *devices_.front(); }

  std::vector<std::unique_ptr<DeviceSlots>> devices_;
  LayerScheduler scheduler_;
  CostModel calibrated_;
  int placed_layer_ = -1;
};

}  // namespace twofold
