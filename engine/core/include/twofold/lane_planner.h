// Plans a layer: every active expert goes to a lane, which is the CPU, a device that holds it, or a device that
// fetches it. All experts of a layer are planned together, because the layer ends with its last lane.
//
// Experts travel to a device in descending load: they pass two stages of equal link time each, so that is the best
// order (Johnson's rule). Plans to begin with: for each device alone the best split of its load-sorted misses (heavy
// end to the device, light end to the CPU; all-CPU and all-fetch are among the splits), and a greedy plan (heaviest
// expert first, each to the lane where the layer then ends first). Single moves and swaps refine them. For layers of
// few experts branch and bound then finds the optimum: experts of equal load and residency are interchangeable, and a
// partial plan that already takes as long as the best one is cut off.
//
// One token's misses are interchangeable on a machine of one device, so its plan is one number, how many of them to
// fetch. It is kept for every (hits, misses, experts under way, backlog): a step looks it up, and so does a device
// that places its layers itself.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "twofold/cost_model.h"

namespace twofold {

struct ExpertLoad {
  int expert = 0;
  int tokens = 0;
  uint32_t resident = 0;    // bit d: in a slot of device d
  uint32_t barred = 0;      // bit d: device d may not fetch it (it is on its way there)
  bool deferrable = false;  // the CPU may run it after the layer
};

// A device's link and staging room at the layer's beginning.
struct DeviceState {
  double backlog_us = 0;
  double queued_us = 0;
  int max_fetch = -1;  // < 0: no limit
};

// What is known of a machine's lanes when a layer begins.
struct LaneStates {
  std::span<const DeviceState> devices;
  double cpu_backlog_us = 0;  // until the CPU finishes the previous layer's deferred experts
  double gap_us = 0;          // from the layer's end to the next one's beginning: free for deferred experts
};

struct DeviceLane {
  std::vector<int> hits;   // run from their slots
  std::vector<int> fetch;  // upload in this order, then run
};

struct LanePlan {
  std::vector<DeviceLane> devices;
  std::vector<int> cpu;
  bool streamed = false;  // the fetched experts of each device are one transfer; none is left to the CPU
  LayerTimes times;
};

class LanePlanner {
 public:
  static constexpr int kExactUpTo = 12;  // layers with at most so many experts get an optimal plan

  // exact_up_to: unless the search exceeds its bound on visited partial plans.
  explicit LanePlanner(CostModel cost, int exact_up_to = kExactUpTo);

  // loads: active experts only (tokens >= 1); of interchangeable ones the first are fetched first. may_stream: one
  // transfer per device is possible. Throws std::invalid_argument on a load below 1 and on another number of devices
  // than the cost model's.
  LanePlan plan(std::span<const ExpertLoad> loads, const LaneStates& lanes, bool may_stream) const;

  const CostModel& cost() const { return cost_; }

 private:
  CostModel cost_;
  int exact_up_to_;
};

// How many misses of one token to fetch on a machine of one device: the plan, kept.
class SplitMemo {
 public:
  // max_routed: most experts of one layer.
  SplitMemo(const CostModel& cost, int max_routed);

  // 0 ... misses; ties go to fewer fetches. in_flight: experts that only the CPU can run. The backlog is rounded to
  // a quarter of an upload; beyond kNumBuckets of them nothing is fetched. Throws std::invalid_argument outside
  // 0 <= hits + misses + in_flight <= max_routed.
  int split(int hits, int misses, int in_flight, double backlog_us);

  static constexpr int kNumBuckets = 32;
  double bucket_us() const { return bucket_us_; }

 private:
  uint8_t best(int hits, int misses, int in_flight, int bucket) const;

  CostModel cost_;
  int max_routed_;
  double bucket_us_;
  std::vector<uint8_t> known_;  // [hits][misses][in_flight][bucket]; kUnknown where nothing has asked yet
};

}  // namespace twofold
