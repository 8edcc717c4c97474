// Emulated GPUs: slots, uploads, evictions and plans are real, kernels run on the CPU from slot memory, time
// is the cost model's on a virtual clock.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "host/page_memory.h"
#include "moe/slotted_accelerator.h"
#include "twofold/timeline.h"

namespace twofold {

// Bytes and flops of everything outside the routed experts: entry i runs between MoE layer i-1 and i, the last
// entry after the last MoE layer (final norm, head).
struct DenseCost {
  std::vector<double> bytes;
  std::vector<double> flops_per_token;
  double router_bytes = 0;  // bytes of one router's gate
  // The CPU's work in each stretch, between two of the accelerator's kernels or at the stretch's ends: not in
  // the figures above. Empty: none.
  std::vector<double> cpu_bytes;
  std::vector<double> cpu_flops_per_token;
  std::vector<double> handovers;  // to the CPU and back
};

// The link of the emulated device: bytes are in their slot as soon as they are uploaded, time passes on the
// virtual clock.
class EmulatedLink final : public Timeline {
 public:
  EmulatedLink(const ExpertStore& store, double upload_us, int num_slots);

  Upload upload(const Transfer& what, UploadLane lane, double duration_us = -1) override;
  void fill(const Transfer& what);
  const std::byte* slot(int index) const { return arena_.data() + size_t(index) * stride_; }
  size_t bytes() const { return arena_.bytes(); }

 private:
  const ExpertStore& store_;
  size_t stride_;
  PageMemory arena_;
};

class EmulatedAccelerator final : public SlottedAccelerator {
 public:
  EmulatedAccelerator(const ExpertStore& store, CostModel cost, LayerSchedulerConfig config,
                      DenseCost dense_cost);

  void predict(int layer, std::span<const float> logits, int num_tokens) override;
  void dense(int layer, int num_tokens) override;
  double virtual_now_us() const override { return scheduler_.devices().now_us(); }
  // The clock continues from that of the accelerator this one replaces.
  void begin_at(double now_us) { scheduler_.devices().advance(now_us); }
  ClockParts clock_parts() const override { return parts_; }
  // All devices together.
  size_t device_bytes() const override;
  const LayerScheduler& scheduler() const override { return scheduler_; }

 private:
  LayerScheduler& scheduler() override { return scheduler_; }
  const std::byte* slot(int device, int index) const override { return links_[size_t(device)]->slot(index); }
  void fill(int device, const Transfer& what) override { links_[size_t(device)]->fill(what); }
  void decided(const LayerDecision& decision, std::span<GroupPlacement> placements) override;
  double cpu_dense_us(int layer, int num_tokens) const;

  DenseCost dense_cost_;
  ClockParts parts_;
  std::vector<std::unique_ptr<EmulatedLink>> links_;  // one per device
  LayerScheduler scheduler_;
};

}  // namespace twofold
