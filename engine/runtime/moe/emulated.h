// A GPU that is played: slots, uploads, evictions and plans are real, kernels run on the CPU from slot
// memory, time is the cost model's on a virtual clock.
#pragma once
#include <cstddef>
#include <vector>

#include "host/page_memory.h"
#include "moe/slotted_accelerator.h"

namespace twofold {

// Bytes and flops of everything that is not routed experts: entry i is what runs between MoE layer i-1 and i,
// the last entry what follows the last MoE layer (final norm, head).
struct DenseCost {
  std::vector<double> bytes;
  std::vector<double> flops_per_token;
  double router_bytes = 0;  // of one router's gate
};

class EmulatedAccelerator final : public SlottedAccelerator {
 public:
  EmulatedAccelerator(const ExpertStore& store, CostModel cost, LayerSchedulerConfig config,
                      DenseCost dense_cost);

  void predict(int layer, std::span<const float> logits, int num_tokens) override;
  void dense(int layer, int num_tokens) override;
  double virtual_now_us() const override { return scheduler().now_us(); }
  ClockParts clock_parts() const override { return parts_; }
  size_t device_bytes() const override { return arena_.bytes(); }

 private:
  const std::byte* slot(int index) const override { return arena_.data() + size_t(index) * slot_stride_; }
  void fill_slot(int layer, int expert, int slot_index) override;
  void carry_out(const Move& move) override { fill_slot(move.layer, move.expert, move.slot); }
  void decided(const LayerDecision& decision, std::span<GroupPlacement> placements) override;

  DenseCost dense_cost_;
  ClockParts parts_;
  size_t slot_stride_;
  PageMemory arena_;
};

}  // namespace twofold
