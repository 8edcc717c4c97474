// Plans for machines of several devices: every active expert of a layer goes to the CPU, to a device that holds it,
// or to a device that fetches it. All experts of a layer are planned together, because the layer ends with its last
// lane (a device or the CPU).
//
// A greedy plan (heaviest expert first, each to the lane where the layer then ends first), and for layers of many
// experts the best plan of each device alone, are refined by single moves and swaps. For layers of few experts
// branch and bound then finds the optimum: experts of equal load and residency are interchangeable, and a partial
// plan that already takes as long as the best one is cut off. Experts travel to a device in descending load, the
// best order of a link (PrefillPlanner).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twofold/cost_model.h"

namespace twofold {

struct MachineLoad {
  int expert = 0;
  int tokens = 0;
  uint32_t resident = 0;  // bit d: in a slot of device d
  uint32_t barred = 0;    // bit d: device d may not fetch it (it is on its way there)
};

// A device's link and staging room at the layer's beginning.
struct DeviceState {
  double backlog_us = 0;
  double queued_us = 0;
  int max_fetch = -1;  // < 0: no limit
};

struct DevicePlan {
  std::vector<int> hits;   // run from their slots
  std::vector<int> fetch;  // upload in this order, then run
};

struct MachinePlan {
  std::vector<DevicePlan> devices;
  std::vector<int> cpu;
  bool streamed =
      false;  // the fetched experts of each device travel as one transfer; none is left to the CPU
  LayerTimes times;
};

class MachinePlanner {
 public:
  // exact_up_to: layers with at most so many experts get an optimal plan, unless the search exceeds its bound on
  // visited partial plans.
  explicit MachinePlanner(const CostModel& cost, int exact_up_to = 12)
      : cost_(cost), exact_up_to_(exact_up_to) {}

  // loads: active experts only (tokens >= 1); of experts with equal load and residency the first ones are fetched
  // first. devices: one per device of the cost model. may_stream: one transfer per device is possible.
  MachinePlan plan(std::span<const MachineLoad> loads, std::span<const DeviceState> devices,
                   bool may_stream) const;

 private:
  CostModel cost_;
  int exact_up_to_;
};

}  // namespace twofold
