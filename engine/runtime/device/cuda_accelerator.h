// The accelerator on a device in real time. Decisions are the scheduler's, as everywhere; uploads are the
// engine's; a slot is used once the device says its copy has passed.
//
// Two kinds of steps. In a step placed by the host (prefill, eager decode) each layer asks place(), and
// whoever launches its kernels calls before_compute and after_compute around them. In a table step (a
// replayed graph) the device places its layers itself, from what begin_table_step published; the host follows
// with what it was told.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "device/device_memory.h"
#include "device/slot_pool.h"
#include "device/slot_tables.h"
#include "device/upload_engine.h"
#include "moe/slotted_accelerator.h"

namespace twofold {

class CudaAccelerator final : public SlottedAccelerator {
 public:
  // Throws DeviceError, DeviceOutOfMemory.
  CudaAccelerator(std::shared_ptr<DeviceApi> api, const ExpertStore& store, CostModel cost,
                  LayerSchedulerConfig config);

  void begin_step(const StepRows& rows) override;
  void dense(int, int) override {}
  double virtual_now_us() const override { return -1; }
  size_t device_bytes() const override { return slots_.bytes(); }
  kernels::Rounding rounding() const override { return kernels::Rounding::kOfDevice; }
  void host_computes() override;
  void end_step() override { uploads_.host_waits(); }

  // Around the kernels of a layer that place() placed, on their stream: those that read what was fetched for
  // the layer come after before_compute, all of them before after_compute.
  void before_compute(StreamHandle compute);
  void after_compute(StreamHandle compute);

  void begin_table_step(StreamHandle compute);
  // The device has placed the layer: where[num_tokens * top_k]. Returns the times predicted for it.
  LayerTimes follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                    std::span<const Placement> where) override;
  // Where the device's routers look a layer ahead: the layer has been placed, and the next one's router says
  // logits[num_tokens * num_experts]. Uploads what is worth it, before anybody waits for the layer's misses.
  void look_ahead(int layer, const LayerRouting& routing, std::span<const Placement> where,
                  std::span<const float> logits);
  // The device is about to place the layer: what it may read beside its table by now. Valid until the next call.
  std::span<const Publication> settle_ahead(int layer);
  // All kernels of the step have been given to the stream.
  void end_table_step(StreamHandle compute);

  const SlotTables& tables() const { return tables_; }
  const SlotPool& slots() const { return slots_; }
  // Where the device sees the host's store, null where it is not pinned; offsets are those of the store.
  const std::byte* store_on_device() const { return store_range_.device_address(); }
  // Why something is slower than it could be; "" if nothing is.
  const std::string& warning() const { return store_range_.warning(); }
  const UploadEngine& uploads() const { return uploads_; }
  // [hits][misses] of one-token layers, as the cost model has it now.
  std::vector<uint8_t> split_table() const { return scheduler_.split_table(); }
  // cuda::ReadPrices for layers of several tokens, word by word; nothing is read where another engine's rule
  // decides.
  std::vector<uint32_t> read_prices() const;
  const LayerScheduler& scheduler() const override { return scheduler_; }

 private:
  LayerScheduler& scheduler() override { return scheduler_; }
  const std::byte* slot(int index) const override { return slots_.slot(index); }
  void fill(const Transfer& what) override { uploads_.fill(what); }
  void decided(const LayerDecision& decision, std::span<GroupPlacement> placements) override;

  // Each stands on those before it: uploads wait for their copies before slots and store go.
  std::shared_ptr<DeviceApi> api_;
  PinnedRange store_range_;
  SlotPool slots_;
  SlotTables tables_;
  UploadEngine uploads_;
  LayerScheduler scheduler_;
  CostModel calibrated_;
  double applied_correction_ = 1;
  int placed_layer_ = -1;
};

}  // namespace twofold
