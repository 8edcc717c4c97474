#include "twofold/lane_planner.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "assignment.h"
#include "growing_plan.h"

namespace twofold {
namespace {

constexpr int kMaxRounds = 64;       // of refinement
constexpr size_t kMaxSwapSide = 48;  // bounds the work of one pass of swaps on very wide layers
constexpr int kMaxVisited = 20'000;  // partial plans of one exact search
constexpr double kHopeful = 1.02;    // a start is refined unless it is longer than the best plan by more than this
constexpr double kSlack = 1 + 1e-9;  // a bound's sums are rounded in another order than a score's

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

// The best split of a device's misses while every other device stays idle: its hits and so many of the heaviest.
void split_for_device(Assignment& plan, size_t device) {
  std::vector<size_t> misses;
  for (size_t i = 0; i < plan.size(); ++i) {
    plan.lanes()[i] = static_cast<uint8_t>(plan.resident(i, device) ? device : plan.cpu());
    if (plan.fetches(i, device) && plan.allowed(i, device)) misses.push_back(i);
  }
  const int room = plan.state(device).max_fetch;
  const size_t most = room < 0 ? misses.size() : std::min(misses.size(), static_cast<size_t>(room));
  double least = plan.score().layer_us;
  size_t best = 0;
  for (size_t count = 1; count <= most; ++count) {
    plan.lanes()[misses[count - 1]] = static_cast<uint8_t>(device);
    const double us = plan.rescore(plan.cpu(), device, [](const Score&) { return true; }).layer_us;
    if (us >= least) continue;
    least = us;
    best = count;
  }
  for (size_t count = best; count < most; ++count) plan.lanes()[misses[count]] = static_cast<uint8_t>(plan.cpu());
}

bool improve_by_move(Assignment& plan, Score& best) {
  for (size_t i = 0; i < plan.size(); ++i) {
    const uint8_t from = plan.lanes()[i];
    for (size_t to = 0; to < plan.num_lanes(); ++to) {
      if (to == from || !plan.allowed(i, to)) continue;
      if (plan.fetches(i, to) && !plan.has_room(to)) continue;
      if (plan.bound_us(i, to) > best.layer_us * kSlack) continue;
      plan.lanes()[i] = static_cast<uint8_t>(to);
      const auto is_better = [&best](const Score& candidate) { return candidate.better_than(best); };
      if (const Score candidate = plan.rescore(from, to, is_better); is_better(candidate)) {
        best = candidate;
        return true;
      }
      plan.lanes()[i] = from;
    }
  }
  return false;
}

bool improve_by_swap(Assignment& plan, Score& best) {
  const size_t side = std::min(plan.size(), 2 * kMaxSwapSide);
  for (size_t i = 0; i < side; ++i) {
    for (size_t j = i + 1; j < side; ++j) {
      const uint8_t a = plan.lanes()[i], b = plan.lanes()[j];
      if (a == b || !plan.allowed(i, b) || !plan.allowed(j, a) || plan.equally_dear(i, j)) continue;
      // A swap that replaces a resident expert by a fetched one needs room there.
      if (plan.fetches(j, a) && !plan.fetches(i, a) && !plan.has_room(a)) continue;
      if (plan.fetches(i, b) && !plan.fetches(j, b) && !plan.has_room(b)) continue;
      if (plan.bound_us_of_swap(i, j) > best.layer_us * kSlack) continue;
      std::swap(plan.lanes()[i], plan.lanes()[j]);
      const auto is_better = [&best](const Score& candidate) { return candidate.better_than(best); };
      if (const Score candidate = plan.rescore(a, b, is_better); is_better(candidate)) {
        best = candidate;
        return true;
      }
      std::swap(plan.lanes()[i], plan.lanes()[j]);
    }
  }
  return false;
}

Score refine(Assignment& plan) {
  Score best = plan.score();
  for (int round = 0; round < kMaxRounds * static_cast<int>(plan.cpu()); ++round) {
    if (!improve_by_move(plan, best) && !improve_by_swap(plan, best)) break;
    plan.times();  // the sums for the next round's bounds
  }
  return best;
}

// Branch and bound over the items in descending load.
class ExactSearch {
 public:
  ExactSearch(Assignment& plan, const Score& best)
      : plan_(plan), growing_(plan), best_(best), lanes_(plan.size()) {}

  // Whether it has found a better plan; the lanes are then its.
  bool run() {
    visit(0);
    if (found_) plan_.lanes() = found_lanes_;
    return found_;
  }

 private:
  void visit(size_t i) {
    if (i == plan_.size()) {
      plan_.lanes() = lanes_;
      const Score score = plan_.score();
      if (score.layer_us >= best_.layer_us * (1 - 1e-9)) return;
      best_ = score;
      found_lanes_ = lanes_;
      found_ = true;
      return;
    }
    const double join_us = plan_.cost().home().profile().join_us;
    const bool follows = i > 0 && plan_.interchangeable(i - 1, i);
    for (size_t lane = follows ? lanes_[i - 1] : 0; lane < plan_.num_lanes(); ++lane) {
      if (!plan_.allowed(i, lane) || !growing_.has_room(i, lane)) continue;
      if (++visited_ > kMaxVisited) return;
      const GrowingLane before = growing_.add(i, lane);
      lanes_[i] = static_cast<uint8_t>(lane);
      if (growing_.end_us() + join_us < best_.layer_us * (1 - 1e-9)) visit(i + 1);
      growing_.restore(lane, before);
    }
  }

  Assignment& plan_;
  GrowingPlan growing_;
  Score best_;
  std::vector<uint8_t> lanes_, found_lanes_;
  int visited_ = 0;
  bool found_ = false;
};

void check(std::span<const ExpertLoad> loads, size_t num_given, int num_devices) {
  if (num_given != static_cast<size_t>(num_devices)) {
    throw std::invalid_argument("LanePlanner: " + std::to_string(num_given) + " device states given, " +
                                std::to_string(num_devices) + " expected");
  }
  for (const ExpertLoad& load : loads) {
    if (load.tokens >= 1) continue;
    throw std::invalid_argument("LanePlanner: expert " + std::to_string(load.expert) + " has " +
                                std::to_string(load.tokens) + " tokens, >= 1 expected (active experts only)");
  }
}

LanePlan shares_of(Assignment& plan) {
  plan.sort_interchangeable();
  LanePlan out;
  out.streamed = plan.streams();
  out.times = plan.times();
  out.devices.resize(plan.cpu());
  for (size_t i = 0; i < plan.size(); ++i) {
    const size_t lane = plan.lanes()[i];
    (lane == plan.cpu()       ? out.cpu
     : plan.resident(i, lane) ? out.devices[lane].hits
                              : out.devices[lane].fetch)
        .push_back(plan.item(i).load->expert);
  }
  return out;
}

}  // namespace

LanePlanner::LanePlanner(CostModel cost, int exact_up_to)
    : cost_(std::move(cost)), exact_up_to_(exact_up_to) {}

LanePlan LanePlanner::plan(std::span<const ExpertLoad> loads, const LaneStates& lanes,
                            bool may_stream) const {
  check(loads, lanes.devices.size(), cost_.num_devices());
  Assignment plan(cost_, loads, lanes);
  Score best;
  std::vector<uint8_t> best_lanes;
  bool streamed = false;
  const auto keep_if_better = [&](const Score& score) {
    if (!best_lanes.empty() && !score.better_than(best)) return;
    best = score;
    best_lanes = plan.lanes();
    streamed = plan.streams();
  };
  const auto search_exactly = [&] {
    if (plan.size() > static_cast<size_t>(exact_up_to_)) return;
    ExactSearch search(plan, best);
    if (search.run()) keep_if_better(plan.score());
  };
  const auto refine_start = [&] {
    if (plan.lanes() == best_lanes && plan.streams() == streamed) return;
    if (plan.score().layer_us < best.layer_us * kHopeful) keep_if_better(refine(plan));
  };
  const auto num_misses =
      std::count_if(loads.begin(), loads.end(), [](const ExpertLoad& load) { return load.resident == 0; });
  if (may_stream && num_misses > 1) {
    plan.set_streams(true);
    if (assign_greedily(plan)) {
      refine_start();
      search_exactly();
    }
    plan.set_streams(false);
  }
  for (size_t d = 0; d < lanes.devices.size(); ++d) {
    split_for_device(plan, d);
    refine_start();
  }
  if (assign_greedily(plan)) refine_start();
  search_exactly();
  plan.set_streams(streamed);
  plan.lanes() = std::move(best_lanes);
  return shares_of(plan);
}

}  // namespace twofold
