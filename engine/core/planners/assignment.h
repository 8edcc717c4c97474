// One assignment of a layer's experts to lanes while the planner improves it: devices 0 ... n - 1, then the CPU.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "twofold/lane_planner.h"

namespace twofold {

inline constexpr double kEqualTimes = 1e-12;  // relative: shorter by less is rounding

// A layer's time, and among plans of equal time how early the lanes end: the way out of a plan in which two lanes
// end last.
struct Score {
  double layer_us = std::numeric_limits<double>::infinity();
  double lanes_us = std::numeric_limits<double>::infinity();
  bool better_than(const Score& other) const {
    if (layer_us < other.layer_us * (1 - kEqualTimes)) return true;
    return layer_us <= other.layer_us && lanes_us < other.lanes_us * (1 - 1e-9);
  }
};

// What is to be planned: the layer's experts in descending load, and the lanes.
class LaneProblem {
 public:
  // Both arguments must outlive it.
  LaneProblem(const CostModel& cost, std::span<const ExpertLoad> loads, const LaneStates& lanes);

  struct Item {
    const ExpertLoad* load = nullptr;
    uint32_t open = 0;  // bit d: device d may run it
    size_t kind = 0;    // the same for interchangeable ones, 0 to num_kinds() - 1
    double cpu_us = 0;
    std::array<double, kMostDevices> gpu_us{};
  };

  size_t size() const { return items_.size(); }
  const Item& item(size_t i) const { return items_[i]; }
  size_t num_devices() const { return states_.devices.size(); }
  size_t cpu() const { return num_devices(); }  // the CPU's lane
  const DeviceState& state(size_t device) const { return states_.devices[device]; }
  const LaneStates& states() const { return states_; }
  const CostModel& cost() const { return cost_; }
  const DeviceCost& device(size_t d) const { return cost_.device(static_cast<int>(d)); }
  bool resident(size_t i, size_t lane) const {
    return lane < num_devices() && ((items_[i].load->resident >> lane) & 1U) != 0;
  }
  bool fetches(size_t i, size_t lane) const { return lane < num_devices() && !resident(i, lane); }
  bool interchangeable(size_t i, size_t j) const { return items_[i].kind == items_[j].kind; }
  size_t num_kinds() const { return num_kinds_; }

 private:
  size_t kind_of(size_t i);

  const CostModel& cost_;
  const LaneStates& states_;
  std::vector<Item> items_;
  size_t num_kinds_ = 0;
};

class Assignment {
 public:
  // All experts begin on the CPU.
  explicit Assignment(const LaneProblem& problem)
      : problem_(problem),
        lane_(problem.size(), static_cast<uint8_t>(problem.cpu())),
        fetched_us_(problem.size()) {}

  const LaneProblem& problem() const { return problem_; }
  std::vector<uint8_t>& lanes() { return lane_; }
  const std::vector<uint8_t>& lanes() const { return lane_; }
  // Whether each device's fetched experts are one transfer, and the CPU runs what it must alone.
  bool streams() const { return streams_; }
  void set_streams(bool streams) { streams_ = streams; }
  // A hit runs on a device that holds it.
  bool allowed(size_t i, size_t lane) const {
    const uint32_t open = problem_.item(i).open;
    if (lane == problem_.cpu()) return problem_.item(i).load->resident == 0 && (!streams_ || open == 0);
    return ((open >> lane) & 1U) != 0;
  }
  // Whether the two could change lanes without a change of any lane's time, as where reading weights takes longest.
  bool equally_dear(size_t i, size_t j) const;
  // Whether the device's staging has room for one more fetched expert.
  bool has_room(size_t device) const;

  // Times of all lanes as the layer will be priced.
  LayerTimes times();
  Score score();
  // The score after some item went from one lane to another; lanes() holds the new one already. Unless it is kept,
  // the lanes' times go back to what they were.
  template <class Keep>
  Score rescore(size_t from, size_t to, Keep keep) {
    const auto before = lane_times_;
    for (const size_t lane : {from, to}) {
      if (lane < problem_.num_devices()) lane_times_[lane] = device_times(lane);
    }
    const Score score = score_of(join());
    if (!keep(score)) lane_times_ = before;
    return score;
  }
  // A lower bound of the layer's time after item i went to lane `to` and, if given, item j from there to i's lane.
  // Far cheaper than a score: sums alone, without the order of fetched experts.
  double bound_us(size_t i, size_t to);
  double bound_us_of_swap(size_t i, size_t j);
  // Among interchangeable experts the first ones get the first lanes.
  void sort_interchangeable();

 private:
  struct Sums {
    double work_us = 0;
    double fetched_us = 0;  // of it, of fetched experts
    int count = 0;
    int num_fetched = 0;
  };

  DeviceTimes device_times(size_t d);
  void add(size_t i, size_t lane, int sign);
  double bound_of_sums() const;
  LayerTimes join() const;
  Score score_of(const LayerTimes& all) const;

  const LaneProblem& problem_;
  bool streams_ = false;
  std::vector<uint8_t> lane_;
  std::array<DeviceTimes, kMostDevices> lane_times_{};
  std::array<Sums, kMostDevices + 1> sums_{};  // per lane, as of the latest `times`
  std::vector<double> fetched_us_;
};

}  // namespace twofold
