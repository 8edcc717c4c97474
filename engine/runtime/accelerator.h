// What stands between routing and compute: for each layer of each step it answers where every routed expert
// runs and from which memory. One interface; `none` and `emulated` live here, `cuda` brings its own.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "event_log.h"
#include "expert_compute.h"
#include "expert_store.h"
#include "online_correction.h"
#include "page_memory.h"
#include "twofold/layer_scheduler.h"

namespace twofold {

// Where one group of tokens runs.
struct GroupPlacement {
  const std::byte* weights;
  Placement where;
};

class Accelerator {
 public:
  virtual ~Accelerator() = default;

  virtual void begin_step(const StepRows& rows) = 0;
  // Fills one placement per group and returns the layer's times on the accelerator's clock (zeros: not known,
  // measure).
  virtual LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                           std::span<GroupPlacement> placements) = 0;
  // Whether predictions for layers ahead are welcome in this step.
  virtual bool wants_prediction() const { return false; }
  // What the router of a layer ahead says to the residual before the next place(): logits[num_tokens *
  // experts].
  virtual void predict(int /*layer*/, std::span<const float> /*logits*/, int /*num_tokens*/) {}
  virtual PrefetchCounts prefetch_counts() const { return {}; }
  // Work outside experts before the given MoE layer, or after the last (layer == number of MoE layers).
  virtual void dense(int layer, int num_tokens) = 0;
  // How long the layer just placed took in real time; only called when there is no virtual clock.
  virtual void measured(const LayerTimes& predicted, int num_tokens, double us) = 0;
  // No work is left: background uploads have all the time they need.
  virtual void idle() = 0;
  // Microseconds of the virtual clock; negative when this accelerator runs in real time.
  virtual double virtual_now_us() const = 0;
  // Device bytes in use: expert slots and staging.
  virtual size_t device_bytes() const = 0;
  virtual int num_slots() const = 0;
};

// All experts on the CPU, straight from the store. With a cost model, every layer's time is predicted before
// it runs.
class NoAccelerator final : public Accelerator {
 public:
  explicit NoAccelerator(const ExpertStore& store, std::optional<CostModel> cost = std::nullopt)
      : store_(store), cost_(std::move(cost)) {}

  void begin_step(const StepRows&) override {}
  LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                   std::span<GroupPlacement> placements) override;
  void dense(int, int) override {}
  void measured(const LayerTimes& predicted, int num_tokens, double us) override;
  void idle() override {}
  double virtual_now_us() const override { return -1; }
  size_t device_bytes() const override { return 0; }
  int num_slots() const override { return 0; }

 private:
  const ExpertStore& store_;
  std::optional<CostModel> cost_;
  OnlineCorrection correction_;
  std::vector<int> loads_;
};

// Bytes and flops of everything that is not routed experts: entry i is what runs between MoE layer i-1 and i,
// the last entry what follows the last MoE layer (final norm, head).
struct DenseCost {
  std::vector<double> bytes;
  std::vector<double> flops_per_token;
  double router_bytes = 0;  // of one router's gate
};

// A GPU that is played: slots, uploads, evictions and plans are real, kernels run on the CPU from slot
// memory, time is the cost model's on a virtual clock.
class EmulatedAccelerator final : public Accelerator {
 public:
  EmulatedAccelerator(const ExpertStore& store, CostModel cost, LayerSchedulerConfig config,
                      DenseCost dense_cost, EventLog& events);

  // Uploads every expert before the first step; only when there is a slot for each (throws std::logic_error
  // otherwise).
  void preload_all();
  // Warm start. What the cache has learned and holds goes to a file; from there, experts return to slots
  // before the first step and cost no time. restore throws std::runtime_error, and changes nothing, when the
  // file is damaged or another model's; it returns how many experts it uploaded.
  void save(const std::string& path) const { scheduler_.cache().save(path); }
  int restore(const std::string& path);

  void begin_step(const StepRows& rows) override;
  LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                   std::span<GroupPlacement> placements) override;
  bool wants_prediction() const override;
  void predict(int layer, std::span<const float> logits, int num_tokens) override;
  PrefetchCounts prefetch_counts() const override { return scheduler_.prefetch_counts(); }
  void dense(int layer, int num_tokens) override;
  void measured(const LayerTimes&, int, double) override {}
  void idle() override;
  double virtual_now_us() const override { return scheduler_.now_us(); }
  size_t device_bytes() const override { return arena_bytes_; }
  int num_slots() const override { return scheduler_.num_slots(); }

  const LayerScheduler& scheduler() const { return scheduler_; }

 private:
  std::byte* slot(int index) const { return arena_.data() + size_t(index) * slot_stride_; }
  void copy_to_slot(int layer, int expert, int slot_index);
  void publish_landed(StepShape shape = {});
  void report_published(const Publication& landed);
  // The row of the step that is charged with an expert's upload: the first token routed to it.
  int64_t request_of(const LayerRouting& routing, const ExpertGroups& groups, int expert) const;

  const ExpertStore& store_;
  LayerScheduler scheduler_;
  DenseCost dense_cost_;
  EventLog& events_;
  size_t slot_stride_;
  size_t arena_bytes_;
  PageMemory arena_;
  StepRows rows_;
  bool decodes_only_ = false;
  std::vector<UploadEvent>
      pending_;  // per slot: its last upload; a background one is completed at publication
};

}  // namespace twofold
