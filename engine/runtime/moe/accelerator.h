// What stands between routing and compute: for each layer of each step it answers where every routed expert
// runs and from which memory. One interface; `none` lives here, those with slots in
// files of their own.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/event_log.h"
#include "moe/expert_compute.h"
#include "moe/expert_store.h"
#include "twofold/layer_scheduler.h"

namespace twofold {

// Where one group of tokens runs.
struct GroupPlacement {
  const std::byte* weights;
  Placement where;
  bool awaited = false;  // its upload may not have landed yet
};

// How steps have passed on a clock, in microseconds since the start; they sum to the steps' time on a virtual
// clock. A layer's experts are the accelerator's while it computes, and the link's or the CPU's only as far
// as the layer waited for them beyond that.
struct ClockParts {
  double dense_us = 0;  // before a MoE layer: attention, router
  double experts_gpu_us = 0;
  double experts_cpu_us = 0;
  double link_us = 0;
  double head_us = 0;
};

class Accelerator {
 public:
  virtual ~Accelerator() = default;

  // Whose books it keeps; the executor says so before the first step.
  virtual void record_to(EventLog& /*events*/) {}
  // Warm start. What the cache has learned and holds goes to a file; from there, experts return to slots
  // before the first step and cost no time. restore throws std::runtime_error, and changes nothing, when the
  // file is damaged or another model's; it returns how many experts it uploaded. Without slots, nothing
  // happens.
  virtual void save(const std::string& /*path*/) const {}
  virtual int restore(const std::string& /*path*/) { return 0; }
  // Between two steps: slots hold exactly what is wanted[layers * experts], and what was missing is uploaded
  // at once, at no cost of time. Returns how many were. Throws std::invalid_argument, and changes nothing,
  // where there are fewer slots. Without slots, nothing happens.
  virtual int place_experts(std::span<const uint8_t> /*wanted*/) { return 0; }
  virtual DynamicUpdateCounts dynamic_update_counts() const { return {}; }
  virtual void begin_step(const StepRows& rows) = 0;
  // Fills one placement per group and returns the layer's times on the accelerator's clock (zeros: not known,
  // measure).
  virtual LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                           std::span<GroupPlacement> placements) = 0;
  // Of the layer just placed, per routed pair: whether its expert's output joins at the next MoE layer (Deferral);
  // empty: none does. They are the CPU's.
  virtual std::span<const uint8_t> deferred() const { return {}; }
  virtual int num_deferred() const { return 0; }
  // How much routers favour what lies in slots (ops/router.h); 0: not at all.
  virtual double cache_prior() const { return 0; }
  // Per expert of the layer whether it is in a slot and usable now; empty: there are no slots. Valid until the next
  // call.
  virtual std::span<const uint8_t> residents(int /*layer*/) { return {}; }
  // How the host rounds beside it; everything but a device leaves that to the level.
  virtual kernels::Rounding rounding() const { return kernels::Rounding::kOfLevel; }
  // The host is about to compute the layer just placed, also what lies in slots. Throws DeviceError where it
  // cannot.
  virtual void host_computes() {}
  // The step's results are known: throws DeviceError where they are worth nothing, because an upload that a
  // layer waited for has failed on its way.
  virtual void end_step() {}
  // The device placed the layer itself, where[num_tokens * top_k]; only what to upload behind it is decided.
  virtual LayerTimes follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                            std::span<const Placement> where);
  // Whether predictions for layers ahead are welcome in this step.
  virtual bool wants_prediction() const { return false; }
  // What the router of a layer ahead says to the residual before the next place(): logits[num_tokens *
  // experts].
  virtual void predict(int /*layer*/, std::span<const float> /*logits*/, int /*num_tokens*/) {}
  virtual PrefetchCounts prefetch_counts() const { return {}; }
  // Work outside experts before the given MoE layer, or after the last (layer == number of MoE layers).
  virtual void dense(int layer, int num_tokens) = 0;
  // No work is left: background uploads have all the time they need.
  virtual void idle() = 0;
  // Microseconds of the virtual clock; negative when this accelerator runs in real time.
  virtual double virtual_now_us() const = 0;
  // Zeros where time is not virtual.
  virtual ClockParts clock_parts() const { return {}; }
  // Device bytes in use: expert slots and staging.
  virtual size_t device_bytes() const = 0;
  virtual int num_slots() const = 0;
};

// All experts on the CPU, straight from the store. With a cost model, every layer's time is predicted before
// it runs.
class NoAccelerator final : public Accelerator {
 public:
  NoAccelerator(const ExpertStore& store, std::optional<CostModel> cost, int num_deferred)
      : store_(store), cost_(std::move(cost)), deferral_(num_deferred, store.num_layers()) {}

  void begin_step(const StepRows& rows) override { generated_ = rows.generated; }
  LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                   std::span<GroupPlacement> placements) override;
  std::span<const uint8_t> deferred() const override { return deferred_; }
  int num_deferred() const override { return deferral_.most(); }
  void dense(int, int) override {}
  void idle() override {}
  double virtual_now_us() const override { return -1; }
  size_t device_bytes() const override { return 0; }
  int num_slots() const override { return 0; }

 private:
  const ExpertStore& store_;
  std::optional<CostModel> cost_;
  std::vector<int> loads_;
  Deferral deferral_;
  std::vector<uint8_t> generated_, on_cpu_;
  std::span<const uint8_t> deferred_;
};

}  // namespace twofold
