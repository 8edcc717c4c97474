// Common base of all accelerators with expert slots: asks the scheduler, reports where each expert lies, and
// records uploads, admissions and evictions. The derived class owns the link, which copies bytes into slots and
// defines the clock, and after it the scheduler that borrows the link.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moe/accelerator.h"

namespace twofold {

class SlottedAccelerator : public Accelerator {
 public:
  // Uploads every expert that may be in a slot before the first step; only when there is a slot for each
  // (throws std::logic_error otherwise).
  void preload_all();
  // Uploads the pinned experts to their slots; before the first step.
  void fill_pinned();
  void record_to(EventLog& events) override;
  // What comes into slots before the first step is recorded as of `first_step`.
  void record_fill(int64_t first_step);
  int64_t record_release() override;
  void save(const std::string& path) const override;
  int restore(const std::string& path) override;
  int place_experts(std::span<const uint8_t> wanted) override;

  void begin_step(const StepRows& rows) override;
  LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                   std::span<GroupPlacement> placements) override;
  bool needs_look_ahead() const override;
  void predict(int layer, std::span<const float> logits, int num_tokens) override {
    scheduler().predict(layer, logits, num_tokens);
  }
  SchedulerCounts scheduler_counts() const override { return scheduler().counts(); }
  void idle() override;
  // All devices together.
  int num_slots() const override;
  int num_devices() const override { return scheduler().devices().count(); }
  std::span<const uint8_t> deferred() const override { return deferred_; }
  int num_deferred() const override { return scheduler().config().num_deferred; }
  double cache_prior() const override { return scheduler().config().cache_prior; }
  std::span<const uint8_t> residents(int layer) override;

  virtual const LayerScheduler& scheduler() const = 0;

 protected:
  // Throws std::invalid_argument where the configuration is not for the store's experts.
  SlottedAccelerator(const ExpertStore& store, const LayerSchedulerConfig& config);
  virtual LayerScheduler& scheduler() = 0;
  const ExpertStore& store() const { return store_; }
  void record_decision(const LayerDecision& decision, int layer, const LayerRouting& routing,
                       const ExpertGroups& groups);

  virtual const std::byte* slot(int device, int index) const = 0;
  // Copies an absent expert into a free slot at once, of the first device that has one.
  bool fetch(int layer, int expert);
  // Copies an expert into a slot at once, outside any step and the link's lanes.
  virtual void fill(int device, const Transfer& what) = 0;
  // The layer is decided; placements may still be changed.
  virtual void decided(const LayerDecision& /*decision*/, std::span<GroupPlacement> /*placements*/) {}

 private:
  void publish_landed(StepShape shape = {});
  void report_landed(const Publication& landed);
  // Number of a device's slot among those of all devices, as in events: slots and staging slots, device by device.
  int event_slot(int device, int slot) const;
  // Records a change of a slot that no layer decided, at once. With one device its contents at the start are known
  // without.
  void record_contents(CacheEventKind kind, int device, const Transfer& what);
  // The row of the step that is charged with an expert's upload: the first token routed to it.
  int64_t request_of(const LayerRouting& routing, const ExpertGroups& groups, int expert) const;

  const ExpertStore& store_;
  std::span<const uint8_t> deferred_;  // pairs of the layer just placed
  std::vector<uint8_t> residents_;
  EventLog* events_ = nullptr;
  StepRows rows_;
  bool decodes_only_ = false;
  bool has_begun_ = false;            // a step has, on these slots or on those before them
  std::vector<UploadEvent> pending_;  // per slot: its last upload; without times until it has landed
  std::vector<UploadEvent> staged_;   // through staging slots, in flight in real time
};

}  // namespace twofold
