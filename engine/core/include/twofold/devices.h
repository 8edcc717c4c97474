// The devices of a machine as a layer scheduler uses them: each has a link, and slots of its own, numbered from 0.
// Staging slots are numbered after them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "twofold/lane_planner.h"
#include "twofold/layer_decision.h"
#include "twofold/scheduler_config.h"
#include "twofold/step_shape.h"

namespace twofold {

class Devices {
 public:
  // links: one for each device, all on one clock; they must outlive this. Throws std::invalid_argument.
  Devices(const CostModel& cost, const LayerSchedulerConfig& config, std::span<Link* const> links);

  int count() const { return static_cast<int>(devices_.size()); }
  Link& link(int device) const { return *devices_[static_cast<size_t>(device)].link; }
  ExpertCache& cache(int device) const { return *devices_[static_cast<size_t>(device)].cache; }
  int num_slots(int device) const { return cache(device).num_slots(); }
  int num_staging() const { return num_staging_; }

  // Every cache learns from the layer's routing. Throws std::invalid_argument where the step has other rows.
  void observe(const RoutedLayer& routed, const StepShape& shape);
  // Distinct experts of the layer's last observed event, ascending, and the tokens of each.
  std::span<const int> active(int layer) const { return cache(0).active(layer); }
  std::span<const int> loads(int layer) const { return cache(0).loads(layer); }

  // Whether a device other than the given one (-1: any) has it in a slot, or on its way there.
  bool holds(int layer, int expert, int except = -1) const;
  // Outcome for an absent expert that a device fetches: it only passes through, it takes the slot of a
  // victim of lower value, or a free one.
  enum class SlotOutcome : uint8_t { kPasses, kReplaces, kFree };
  SlotOutcome slot_outcome_of(int layer, int expert, int device) const;
  bool is_resident_anywhere(int layer, int expert) const;
  // An active expert for the planner: the devices that have it in a slot, and those that may not fetch it.
  ExpertLoad load_of(int layer, int expert, int tokens) const;

  double now_us() const { return link(0).now_us(); }
  void advance(double us);
  // Waits until every queued upload has landed.
  void drain();
  // Total copy time of the links so far.
  double copied_us() const { return copied_us_; }
  void count_copied(const Upload& upload) {
    if (!upload.failed) copied_us_ += upload.end_us - upload.begin_us;
  }
  // Passes the move to its link and records the times that the link reports. duration_us < 0: the link's.
  void upload(Move& move, double duration_us = -1);

 private:
  struct Device {
    Link* link = nullptr;
    std::unique_ptr<ExpertCache> cache;
  };
  std::vector<Device> devices_;
  int num_staging_;
  double copied_us_ = 0;
};

}  // namespace twofold
