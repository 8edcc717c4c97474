// Decides placement between routing and compute: for each layer of each step, where every routed expert runs
// and from which memory. `none` is defined here; accelerators with slots have their own files.
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
  int device = 0;        // that runs it; 0 on the CPU
};

// Time breakdown of steps on a clock, in microseconds since the start; on a virtual clock the parts sum to the
// steps' time. A layer's expert time counts for the accelerator while it computes; for the link or the CPU only
// as far as the layer waited for them beyond that.
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

  // Sets the event log; called by the executor before the first step.
  virtual void record_to(EventLog& /*events*/) {}
  // Warm start. save writes the cache's learned state and residents to a file; restore returns experts to slots
  // from it before the first step, at no cost of time. restore throws std::runtime_error, and changes nothing,
  // if the file is damaged or another model's; it returns how many experts it uploaded. No effect without
  // slots.
  virtual void save(const std::string& /*path*/) const {}
  virtual int restore(const std::string& /*path*/) { return 0; }
  // Between two steps: makes slots hold exactly wanted[layers * experts]; missing experts are uploaded at once,
  // at no cost of time. Returns how many were uploaded. Throws std::invalid_argument, and changes nothing, if
  // there are fewer slots. No effect without slots.
  virtual int place_experts(std::span<const uint8_t> /*wanted*/) { return 0; }
  // Records that all experts leave their slots, which are freed after this call. Returns the last step's number; -1 if
  // no step has begun, or there are no slots.
  virtual int64_t record_release() { return -1; }
  virtual void begin_step(const StepRows& rows) = 0;
  // Fills one placement per group and returns the layer's times on the accelerator's clock (zeros: not known,
  // to be measured).
  virtual LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                           std::span<GroupPlacement> placements) = 0;
  // For the layer just placed, per routed pair: whether its expert's output joins at the next MoE layer
  // (Deferral); empty: none does. Deferred pairs run on the CPU.
  virtual std::span<const uint8_t> deferred() const { return {}; }
  virtual int num_deferred() const { return 0; }
  // Strength of the routers' preference for experts in slots (ops/router.h); 0: off.
  virtual double cache_prior() const { return 0; }
  // Per expert of the layer: whether it is in a slot and usable now; empty: there are no slots. Valid until the
  // next call.
  virtual std::span<const uint8_t> residents(int /*layer*/) { return {}; }
  // The host's rounding beside this accelerator; only a device overrides the level's.
  virtual kernels::Rounding rounding() const { return kernels::Rounding::kOfLevel; }
  // Called before the host computes the layer just placed, including experts in slots. Throws DeviceError where
  // it cannot.
  virtual void host_computes() {}
  // Ends a step whose results are known: throws DeviceError if they are invalid because an upload that a layer
  // waited for failed during its copy.
  virtual void end_step() {}
  // Follows a layer that the device placed itself, where[num_tokens * top_k]; only uploads after it are
  // decided.
  virtual LayerTimes follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                            std::span<const Placement> where);
  // Whether predictions for later layers are used in this step.
  virtual bool needs_look_ahead() const { return false; }
  // Takes the logits that a later layer's router computes from the residual before the next place():
  // logits[num_tokens * experts].
  virtual void predict(int /*layer*/, std::span<const float> /*logits*/, int /*num_tokens*/) {}
  virtual SchedulerCounts scheduler_counts() const { return {}; }
  // Work outside the experts before the given MoE layer, or after the last (layer == number of MoE layers).
  virtual void dense(int layer, int num_tokens) = 0;
  // The machine is idle: background uploads have all the time they need.
  virtual void idle() = 0;
  // Microseconds of the virtual clock; negative when this accelerator runs in real time.
  virtual double virtual_now_us() const = 0;
  // Zeros on a real-time clock.
  virtual ClockParts clock_parts() const { return {}; }
  // Device bytes in use: expert slots and staging.
  virtual size_t device_bytes() const = 0;
  virtual int num_slots() const = 0;
  virtual int num_devices() const { return 1; }
};

// All experts on the CPU, read directly from the store. With a cost model, every layer's time is predicted
// before it runs.
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
