#include "twofold/machine_planner.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string>

#include "twofold/prefill_planner.h"

namespace twofold {
namespace {

constexpr int kMaxRounds = 64;       // of refinement
constexpr size_t kMaxSwapSide = 48;  // bounds the work of one pass of swaps on very wide layers
constexpr int kMaxVisited = 20'000;  // partial plans of one exact search
constexpr double kEqual = 1e-12;

struct Item {
  const MachineLoad* load = nullptr;
  double cpu_us = 0;
  std::array<double, kMostDevices> gpu_us{};
};

// A layer's time, and among plans of equal time how early the lanes end: the way out of a plan in which two lanes
// end last.
struct Score {
  double layer_us = std::numeric_limits<double>::infinity();
  double lanes_us = std::numeric_limits<double>::infinity();
  bool better_than(const Score& other) const {
    if (layer_us < other.layer_us * (1 - kEqual)) return true;
    return layer_us <= other.layer_us && lanes_us < other.lanes_us * (1 - 1e-9);
  }
};

// One assignment of experts to lanes: devices 0 ... n - 1, then the CPU. Items are in descending load.
class Assignment {
 public:
  Assignment(const CostModel& cost, std::span<const MachineLoad> loads, std::span<const DeviceState> devices)
      : cost_(cost), devices_(devices), num_devices_(devices.size()) {
    for (const MachineLoad& load : loads) {
      Item item;
      item.load = &load;
      item.cpu_us = cost.cpu_expert_us(load.tokens);
      for (size_t d = 0; d < num_devices_; ++d)
        item.gpu_us[d] = cost.device(static_cast<int>(d)).gpu_expert_us(load.tokens);
      items_.push_back(item);
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.load->tokens > b.load->tokens; });
    lane_.assign(items_.size(), static_cast<uint8_t>(cpu()));
  }

  size_t cpu() const { return num_devices_; }
  size_t num_lanes() const { return num_devices_ + (streams_ ? 0 : 1); }
  size_t size() const { return items_.size(); }
  const Item& item(size_t i) const { return items_[i]; }
  const DeviceState& state(size_t device) const { return devices_[device]; }
  const CostModel& cost() const { return cost_; }
  std::vector<uint8_t>& lanes() { return lane_; }
  bool streams() const { return streams_; }
  void set_streams(bool streams) { streams_ = streams; }

  bool resident(size_t i, size_t lane) const {
    return lane < num_devices_ && ((items_[i].load->resident >> lane) & 1U) != 0;
  }
  bool fetches(size_t i, size_t lane) const { return lane < num_devices_ && !resident(i, lane); }
  bool allowed(size_t i, size_t lane) const {
    if (lane == cpu()) return !streams_;
    return resident(i, lane) || ((items_[i].load->barred >> lane) & 1U) == 0;
  }
  bool interchangeable(size_t i, size_t j) const {
    const MachineLoad &a = *items_[i].load, &b = *items_[j].load;
    return a.tokens == b.tokens && a.resident == b.resident && a.barred == b.barred;
  }

  // Times of all lanes for lane_, computed as the layer will be priced.
  LayerTimes times() {
    for (size_t d = 0; d < num_devices_; ++d) lane_times_[d] = device_times(d);
    return join();
  }
  Score score() {
    const LayerTimes all = times();
    return {all.layer_us, lanes_us(all)};
  }
  // The score after item i went from one lane to another; lane_ holds the new one already.
  Score rescore(size_t from, size_t to) {
    if (from < num_devices_) lane_times_[from] = device_times(from);
    if (to < num_devices_) lane_times_[to] = device_times(to);
    const LayerTimes all = join();
    return {all.layer_us, lanes_us(all)};
  }
  bool has_room(size_t device) const {
    const int most = devices_[device].max_fetch;
    if (most < 0) return true;
    int count = 0;
    for (size_t i = 0; i < size(); ++i) count += lane_[i] == device && fetches(i, device);
    return count < most;
  }

  // Of interchangeable experts the first ones get the first lanes.
  void sort_interchangeable() {
    for (size_t begin = 0; begin < size();) {
      size_t end = begin + 1;
      while (end < size() && interchangeable(begin, end)) ++end;
      std::sort(lane_.begin() + static_cast<std::ptrdiff_t>(begin),
                lane_.begin() + static_cast<std::ptrdiff_t>(end));
      begin = end;
    }
  }

 private:
  DeviceTimes device_times(size_t d) {
    double hit_us = 0;
    int num_hits = 0;
    fetched_us_.clear();
    for (size_t i = 0; i < size(); ++i) {
      if (lane_[i] != d) continue;
      if (resident(i, d)) {
        hit_us += items_[i].gpu_us[d];
        ++num_hits;
      } else {
        fetched_us_.push_back(items_[i].gpu_us[d]);
      }
    }
    return cost_.device(static_cast<int>(d))
        .device_from_sums(num_hits, hit_us, fetched_us_, devices_[d].backlog_us, devices_[d].queued_us,
                          streams_);
  }

  LayerTimes join() const {
    LayerTimes all;
    std::array<double, kMostDevices> copying{};
    for (size_t d = 0; d < num_devices_; ++d) {
      copying[d] = lane_times_[d].copying_us;
      all.gpu_us = std::max(all.gpu_us, lane_times_[d].gpu_us);
    }
    double cpu_work = 0;
    int num_cpu = 0;
    for (size_t i = 0; i < size(); ++i) {
      if (lane_[i] != cpu()) continue;
      cpu_work += items_[i].cpu_us;
      ++num_cpu;
    }
    all.cpu_us = cost_.cpu_from_sums(num_cpu, cpu_work, std::span(copying).first(num_devices_), all.dma_busy);
    all.layer_us = std::max(all.gpu_us, all.cpu_us) + cost_.profile().join_us;
    return all;
  }

  double lanes_us(const LayerTimes& all) const {
    double sum = all.cpu_us;
    for (size_t d = 0; d < num_devices_; ++d) sum += lane_times_[d].gpu_us;
    return sum;
  }

  const CostModel& cost_;
  std::span<const DeviceState> devices_;
  size_t num_devices_;
  bool streams_ = false;
  std::vector<Item> items_;
  std::vector<uint8_t> lane_;
  std::array<DeviceTimes, kMostDevices> lane_times_{};
  std::vector<double> fetched_us_;
};

// A lane's end while experts are added in descending load. With hits H, fetched experts F and A = the end of the
// fetched chain alone, a device ends at max(A, x + g + H + F): the same as running the hits first.
struct GrowingLane {
  double begin_us = 0;  // x + g, or h
  double work_us = 0;   // H + F, or the CPU's work
  double chain_us = 0;  // A
  double landed_us = 0;
  double copying_us = 0;
  int count = 0;
  int num_fetched = 0;
  double end_us() const { return count == 0 ? 0 : std::max(chain_us, begin_us + work_us); }
};

class GrowingPlan {
 public:
  explicit GrowingPlan(const Assignment& plan) : plan_(plan), lanes_(plan.cpu() + 1) {
    for (size_t d = 0; d < plan.cpu(); ++d) {
      const MachineProfile& device = profile(d);
      GrowingLane& lane = lanes_[d];
      lane.begin_us = device.exchange_us + device.gpu_launch_us;
      lane.landed_us = plan.state(d).backlog_us;
      lane.copying_us = std::max(plan.state(d).queued_us, lane.landed_us);
    }
  }

  bool has_room(size_t i, size_t lane) const {
    const int most = lane < plan_.cpu() ? plan_.state(lane).max_fetch : -1;
    return most < 0 || !plan_.fetches(i, lane) || lanes_[lane].num_fetched < most;
  }

  GrowingLane add(size_t i, size_t to) {
    GrowingLane& lane = lanes_[to];
    const GrowingLane before = lane;
    ++lane.count;
    if (to == plan_.cpu()) {
      lane.work_us += plan_.item(i).cpu_us;
      return before;
    }
    const double us = plan_.item(i).gpu_us[to];
    lane.work_us += us;
    if (plan_.resident(i, to)) return before;
    const CostModel& cost = plan_.cost().device(static_cast<int>(to));
    const double upload_us =
        cost.upload_us() - (plan_.streams() && lane.num_fetched > 0 ? profile(to).link_latency_us : 0.0);
    ++lane.num_fetched;
    lane.landed_us += upload_us;
    lane.copying_us += upload_us;
    lane.chain_us = std::max(lane.chain_us, lane.landed_us) + us;
    return before;
  }
  void restore(size_t lane, const GrowingLane& before) { lanes_[lane] = before; }

  // A lower bound for every plan that continues this one.
  double end_us() const {
    double end = 0;
    std::array<double, kMostDevices> copying{};
    for (size_t d = 0; d < plan_.cpu(); ++d) {
      end = std::max(end, lanes_[d].end_us());
      copying[d] = lanes_[d].copying_us;
    }
    double busy = 0;
    const GrowingLane& cpu = lanes_[plan_.cpu()];
    return std::max(
        end, plan_.cost().cpu_from_sums(cpu.count, cpu.work_us, std::span(copying).first(plan_.cpu()), busy));
  }
  double lane_end_us(size_t lane) const { return lanes_[lane].end_us(); }

 private:
  const MachineProfile& profile(size_t d) const { return plan_.cost().device(static_cast<int>(d)).profile(); }

  const Assignment& plan_;
  std::vector<GrowingLane> lanes_;
};

// Heaviest first, each to the lane where the layer ends first; false if some expert fits nowhere.
bool assign_greedily(Assignment& plan) {
  GrowingPlan growing(plan);
  for (size_t i = 0; i < plan.size(); ++i) {
    size_t best = plan.cpu() + 1;
    double best_end = std::numeric_limits<double>::infinity(), best_lane_end = best_end;
    for (size_t lane = 0; lane < plan.num_lanes(); ++lane) {
      if (!plan.allowed(i, lane) || !growing.has_room(i, lane)) continue;
      const GrowingLane before = growing.add(i, lane);
      const double end = growing.end_us(), lane_end = growing.lane_end_us(lane);
      growing.restore(lane, before);
      if (end > best_end || (end == best_end && lane_end >= best_lane_end)) continue;
      best = lane;
      best_end = end;
      best_lane_end = lane_end;
    }
    if (best > plan.cpu()) return false;
    growing.add(i, best);
    plan.lanes()[i] = static_cast<uint8_t>(best);
  }
  return true;
}

// The plan of one device alone; every other device stays idle.
void assign_to_one_device(Assignment& plan, size_t device) {
  std::vector<ExpertLoad> loads;
  for (size_t i = 0; i < plan.size(); ++i) {
    plan.lanes()[i] = static_cast<uint8_t>(plan.cpu());
    if (plan.allowed(i, device))
      loads.push_back({static_cast<int>(i), plan.item(i).load->tokens, plan.resident(i, device)});
  }
  const DeviceState& state = plan.state(device);
  const PrefillPlan alone = PrefillPlanner(plan.cost().device(static_cast<int>(device)))
                                .plan(loads, state.backlog_us, state.queued_us, state.max_fetch);
  for (int i : alone.resident) plan.lanes()[static_cast<size_t>(i)] = static_cast<uint8_t>(device);
  if (alone.streamed) return;  // another candidate
  for (int i : alone.fetch) plan.lanes()[static_cast<size_t>(i)] = static_cast<uint8_t>(device);
}

bool improve_by_move(Assignment& plan, Score& best) {
  for (size_t i = 0; i < plan.size(); ++i) {
    const uint8_t from = plan.lanes()[i];
    for (size_t to = 0; to < plan.num_lanes(); ++to) {
      if (to == from || !plan.allowed(i, to)) continue;
      if (plan.fetches(i, to) && !plan.has_room(to)) continue;
      plan.lanes()[i] = static_cast<uint8_t>(to);
      const Score candidate = plan.rescore(from, to);
      if (candidate.better_than(best)) {
        best = candidate;
        return true;
      }
      plan.lanes()[i] = from;
      plan.rescore(from, to);
    }
  }
  return false;
}

bool improve_by_swap(Assignment& plan, Score& best) {
  const size_t side = std::min(plan.size(), 2 * kMaxSwapSide);
  for (size_t i = 0; i < side; ++i) {
    for (size_t j = i + 1; j < side; ++j) {
      const uint8_t a = plan.lanes()[i], b = plan.lanes()[j];
      if (a == b || plan.interchangeable(i, j) || !plan.allowed(i, b) || !plan.allowed(j, a)) continue;
      // A swap that replaces a resident expert by a fetched one needs room there.
      if (plan.fetches(j, a) && !plan.fetches(i, a) && !plan.has_room(a)) continue;
      if (plan.fetches(i, b) && !plan.fetches(j, b) && !plan.has_room(b)) continue;
      std::swap(plan.lanes()[i], plan.lanes()[j]);
      const Score candidate = plan.rescore(a, b);
      if (candidate.better_than(best)) {
        best = candidate;
        return true;
      }
      std::swap(plan.lanes()[i], plan.lanes()[j]);
      plan.rescore(a, b);
    }
  }
  return false;
}

Score refine(Assignment& plan) {
  Score best = plan.score();
  for (int round = 0; round < kMaxRounds * static_cast<int>(plan.cpu()); ++round) {
    if (!improve_by_move(plan, best) && !improve_by_swap(plan, best)) break;
  }
  return best;
}

// Branch and bound over the items in descending load.
class ExactSearch {
 public:
  ExactSearch(Assignment& plan, double best_us)
      : plan_(plan), growing_(plan), best_us_(best_us - plan.cost().profile().join_us), lanes_(plan.size()) {}

  // Whether it has found a better plan; the lanes are then its.
  bool run() {
    visit(0);
    return found_;
  }

 private:
  void visit(size_t i) {
    if (i == plan_.size()) {
      best_us_ = growing_.end_us();
      plan_.lanes() = lanes_;
      found_ = true;
      return;
    }
    const bool follows = i > 0 && plan_.interchangeable(i - 1, i);
    for (size_t lane = follows ? lanes_[i - 1] : 0; lane < plan_.num_lanes(); ++lane) {
      if (!plan_.allowed(i, lane) || !growing_.has_room(i, lane)) continue;
      if (++visited_ > kMaxVisited) return;
      const GrowingLane before = growing_.add(i, lane);
      lanes_[i] = static_cast<uint8_t>(lane);
      if (growing_.end_us() < best_us_ * (1 - 1e-9)) visit(i + 1);
      growing_.restore(lane, before);
    }
  }

  Assignment& plan_;
  GrowingPlan growing_;
  double best_us_;
  std::vector<uint8_t> lanes_;
  int visited_ = 0;
  bool found_ = false;
};

void check(std::span<const MachineLoad> loads, size_t num_given, int num_devices) {
  if (num_given != static_cast<size_t>(num_devices)) {
    throw std::invalid_argument("MachinePlanner: " + std::to_string(num_given) + " device states given, " +
                                std::to_string(num_devices) + " expected");
  }
  for (const MachineLoad& load : loads) {
    if (load.tokens >= 1) continue;
    throw std::invalid_argument("MachinePlanner: expert " + std::to_string(load.expert) + " has " +
                                std::to_string(load.tokens) + " tokens, >= 1 expected (active experts only)");
  }
}

}  // namespace

MachinePlan MachinePlanner::plan(std::span<const MachineLoad> loads, std::span<const DeviceState> devices,
                                 bool may_stream) const {
  check(loads, devices.size(), cost_.num_devices());
  Assignment plan(cost_, loads, devices);
  Score best;
  std::vector<uint8_t> lanes;
  bool streamed = false;
  const auto keep_if_better = [&](const Score& score) {
    if (!lanes.empty() && !score.better_than(best)) return;
    best = score;
    lanes = plan.lanes();
    streamed = plan.streams();
  };
  const bool few = plan.size() <= static_cast<size_t>(exact_up_to_);
  const auto search_exactly = [&] {
    if (!few) return;
    ExactSearch search(plan, best.layer_us);
    if (search.run()) keep_if_better(plan.score());
  };
  if (assign_greedily(plan)) keep_if_better(refine(plan));
  for (size_t d = 0; !few && d < devices.size(); ++d) {
    assign_to_one_device(plan, d);
    keep_if_better(refine(plan));
  }
  search_exactly();
  const auto num_misses =
      std::count_if(loads.begin(), loads.end(), [](const MachineLoad& load) { return load.resident == 0; });
  if (may_stream && num_misses > 1) {
    plan.set_streams(true);
    if (assign_greedily(plan)) keep_if_better(refine(plan));
    search_exactly();
  }
  plan.set_streams(streamed);
  plan.lanes() = std::move(lanes);
  plan.sort_interchangeable();

  MachinePlan out;
  out.streamed = streamed;
  out.times = plan.times();
  out.devices.resize(devices.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    const size_t lane = plan.lanes()[i];
    (lane == plan.cpu()       ? out.cpu
     : plan.resident(i, lane) ? out.devices[lane].hits
                              : out.devices[lane].fetch)
        .push_back(plan.item(i).load->expert);
  }
  return out;
}

}  // namespace twofold
