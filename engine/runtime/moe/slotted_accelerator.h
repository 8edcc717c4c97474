// What all accelerators with expert slots do alike: ask the scheduler, say where each expert lies, and keep
// the books of uploads, admissions and evictions. How bytes come into a slot, and which clock counts, is the
// derived class's.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moe/accelerator.h"

namespace twofold {

class SlottedAccelerator : public Accelerator {
 public:
  // Uploads every expert before the first step; only when there is a slot for each (throws std::logic_error
  // otherwise).
  void preload_all();
  void record_to(EventLog& events) override { events_ = &events; }
  void save(const std::string& path) const override { scheduler_->cache().save(path); }
  int restore(const std::string& path) override;

  void begin_step(const StepRows& rows) override;
  LayerTimes place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                   std::span<GroupPlacement> placements) override;
  bool wants_prediction() const override;
  PrefetchCounts prefetch_counts() const override { return scheduler_->prefetch_counts(); }
  void idle() override;
  int num_slots() const override { return scheduler_->num_slots(); }

  const LayerScheduler& scheduler() const { return *scheduler_; }

 protected:
  explicit SlottedAccelerator(const ExpertStore& store) : store_(store) {}
  // Before anything else: the derived class makes the scheduler, and what it stands on, first.
  void use(std::unique_ptr<LayerScheduler> scheduler);
  void give_up_scheduler() { scheduler_.reset(); }
  LayerScheduler& scheduler() { return *scheduler_; }
  const ExpertStore& store() const { return store_; }
  void keep_books(const LayerDecision& decision, int layer, const LayerRouting& routing,
                  const ExpertGroups& groups);

  virtual const std::byte* slot(int index) const = 0;
  // Copies an expert into a slot at once, outside of any step.
  virtual void fill_slot(int layer, int expert, int slot_index) = 0;
  // A move was decided; a link in real time has it already.
  virtual void carry_out(const Move& move) = 0;
  // The layer is decided; placements may yet be changed.
  virtual void decided(const LayerDecision& /*decision*/, std::span<GroupPlacement> /*placements*/) {}

 private:
  void publish_landed(StepShape shape = {});
  void report_landed(const Publication& landed);
  // The row of the step that is charged with an expert's upload: the first token routed to it.
  int64_t request_of(const LayerRouting& routing, const ExpertGroups& groups, int expert) const;

  const ExpertStore& store_;
  std::unique_ptr<LayerScheduler> scheduler_;
  EventLog* events_ = nullptr;
  StepRows rows_;
  bool decodes_only_ = false;
  std::vector<UploadEvent> pending_;  // per slot: its last upload; without times until it has landed
  std::vector<UploadEvent> staged_;   // through staging slots, under way in real time
};

}  // namespace twofold
