#include "twofold/lane_planner.h"

#include <algorithm>
#include <array>
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
constexpr double kRefineBelow =
    1.02;  // a start is refined unless it is longer than the best plan by more than this
constexpr double kSlack = 1 + 1e-9;  // a bound's sums are rounded in another order than a score's

// Heaviest first, each to the lane where the layer ends first; false if some expert fits nowhere.
bool assign_greedily(Assignment& plan) {
  GrowingPlan growing(plan);
  for (size_t i = 0; i < plan.problem().size(); ++i) {
    size_t best = plan.problem().cpu() + 1;
    double best_end = std::numeric_limits<double>::infinity(), best_lane_end = best_end;
    for (size_t lane = 0; lane < plan.problem().cpu() + 1; ++lane) {
      if (!plan.allowed(i, lane) || !growing.has_room(i, lane)) continue;
      const GrowingLane before = growing.add(i, lane);
      const double end = growing.end_us(), lane_end = growing.lane_end_us(lane);
      growing.restore(lane, before);
      if (end > best_end || (end == best_end && lane_end >= best_lane_end)) continue;
      best = lane;
      best_end = end;
      best_lane_end = lane_end;
    }
    if (best > plan.problem().cpu()) return false;
    growing.add(i, best);
    plan.lanes()[i] = static_cast<uint8_t>(best);
  }
  return true;
}

// Where a hit runs that the device itself has not: the fastest holder; the CPU if there is none.
size_t other_lane(const LaneProblem& problem, size_t i) {
  size_t best = problem.cpu();
  for (size_t d = 0; d < problem.num_devices(); ++d) {
    if (!problem.resident(i, d)) continue;
    if (best == problem.cpu() || problem.item(i).gpu_us[d] < problem.item(i).gpu_us[best]) best = d;
  }
  return best;
}

// The best split of a device's misses while the others run only what they alone have: its hits and so many of the
// heaviest.
void split_for_device(Assignment& plan, size_t device) {
  const LaneProblem& problem = plan.problem();
  std::vector<size_t> misses;
  for (size_t i = 0; i < problem.size(); ++i) {
    plan.lanes()[i] = static_cast<uint8_t>(problem.resident(i, device) ? device : other_lane(problem, i));
    if (problem.fetches(i, device) && plan.allowed(i, device)) misses.push_back(i);
  }
  const int room = problem.state(device).max_fetch;
  const size_t most = room < 0 ? misses.size() : std::min(misses.size(), static_cast<size_t>(room));
  double least = plan.score().layer_us;
  size_t best = 0;
  for (size_t count = 1; count <= most; ++count) {
    uint8_t& lane = plan.lanes()[misses[count - 1]];
    const size_t from = std::exchange(lane, static_cast<uint8_t>(device));
    const double us = plan.rescore(from, device, [](const Score&) { return true; }).layer_us;
    if (us >= least) continue;
    least = us;
    best = count;
  }
  for (size_t count = best; count < most; ++count)
    plan.lanes()[misses[count]] = static_cast<uint8_t>(other_lane(problem, misses[count]));
}

bool improve_by_move(Assignment& plan, Score& best) {
  for (size_t i = 0; i < plan.problem().size(); ++i) {
    const uint8_t from = plan.lanes()[i];
    for (size_t to = 0; to < plan.problem().cpu() + 1; ++to) {
      if (to == from || !plan.allowed(i, to)) continue;
      if (plan.problem().fetches(i, to) && !plan.has_room(to)) continue;
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

// Whether a swap of two items' lanes may shorten the layer.
bool may_swap(Assignment& plan, size_t i, size_t j, const Score& best) {
  const size_t a = plan.lanes()[i], b = plan.lanes()[j];
  if (a == b || !plan.allowed(i, b) || !plan.allowed(j, a) || plan.equally_dear(i, j)) return false;
  // A swap that replaces a resident expert by a fetched one needs room there.
  if (plan.problem().fetches(j, a) && !plan.problem().fetches(i, a) && !plan.has_room(a)) return false;
  if (plan.problem().fetches(i, b) && !plan.problem().fetches(j, b) && !plan.has_room(b)) return false;
  return plan.bound_us_of_swap(i, j) <= best.layer_us * kSlack;
}

// Pairs of items that may not swap. Items of one kind in one lane are at one place: what holds for one holds for all.
class Refused {
 public:
  explicit Refused(const Assignment& plan) : places_(plan.problem().size()), after_(places_.size()) {
    const size_t lanes = plan.problem().cpu() + 1;
    is_on_ = plan.problem().num_kinds() * lanes <= 64;
    uint64_t after = 0;
    for (size_t i = places_.size(); is_on_ && i-- > 0;) {
      places_[i] = static_cast<uint8_t>(plan.problem().item(i).kind * lanes + plan.lanes()[i]);
      after_[i] = after;
      after |= uint64_t{1} << places_[i];
    }
  }
  bool has(size_t i, size_t j) const { return is_on_ && ((pairs_[places_[i]] >> places_[j]) & 1U) != 0; }
  // Whether item i may swap with none of the items after it.
  bool has_all_after(size_t i) const { return is_on_ && (after_[i] & ~pairs_[places_[i]]) == 0; }
  void add(size_t i, size_t j) {
    if (is_on_) pairs_[places_[i]] |= uint64_t{1} << places_[j];
  }

 private:
  bool is_on_ = false;
  std::vector<uint8_t> places_;
  std::vector<uint64_t> after_;  // bit p: some item after this one is at place p
  std::array<uint64_t, 64> pairs_{};
};

bool improve_by_swap(Assignment& plan, Score& best) {
  const size_t side = std::min(plan.problem().size(), 2 * kMaxSwapSide);
  Refused refused(plan);
  for (size_t i = 0; i < side; ++i) {
    if (refused.has_all_after(i)) continue;
    for (size_t j = i + 1; j < side; ++j) {
      if (refused.has(i, j)) continue;
      if (!may_swap(plan, i, j, best)) {
        refused.add(i, j);
        continue;
      }
      const uint8_t a = plan.lanes()[i], b = plan.lanes()[j];
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
  for (int round = 0; round < kMaxRounds * static_cast<int>(plan.problem().cpu()); ++round) {
    if (!improve_by_move(plan, best) && !improve_by_swap(plan, best)) break;
    plan.times();  // the sums for the next round's bounds
  }
  return best;
}

// Branch and bound over the items in descending load.
class ExactSearch {
 public:
  ExactSearch(Assignment& plan, const Score& best)
      : plan_(plan), growing_(plan), best_(best), lanes_(plan.problem().size()) {}

  // Whether it has found a better plan; the lanes are then its.
  bool run() {
    visit(0);
    if (found_) plan_.lanes() = found_lanes_;
    return found_;
  }

 private:
  void visit(size_t i) {
    if (i == plan_.problem().size()) {
      plan_.lanes() = lanes_;
      const Score score = plan_.score();
      if (score.layer_us >= best_.layer_us * (1 - 1e-9)) return;
      best_ = score;
      found_lanes_ = lanes_;
      found_ = true;
      return;
    }
    const double join_us = plan_.problem().cost().home().profile().join_us;
    const bool follows = i > 0 && plan_.problem().interchangeable(i - 1, i);
    for (size_t lane = follows ? lanes_[i - 1] : 0; lane < plan_.problem().cpu() + 1; ++lane) {
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
  out.devices.resize(plan.problem().cpu());
  for (size_t i = 0; i < plan.problem().size(); ++i) {
    const size_t lane = plan.lanes()[i];
    (lane == plan.problem().cpu()       ? out.cpu
     : plan.problem().resident(i, lane) ? out.devices[lane].hits
                                        : out.devices[lane].fetch)
        .push_back(plan.problem().item(i).load->expert);
  }
  return out;
}

}  // namespace

LanePlanner::LanePlanner(CostModel cost, int exact_up_to)
    : cost_(std::move(cost)), exact_up_to_(exact_up_to) {}

LanePlan LanePlanner::plan(std::span<const ExpertLoad> loads, const LaneStates& lanes,
                           bool may_stream) const {
  check(loads, lanes.devices.size(), cost_.num_devices());
  const LaneProblem problem(cost_, loads, lanes);
  Assignment plan(problem);
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
    if (plan.problem().size() > static_cast<size_t>(exact_up_to_)) return;
    ExactSearch search(plan, best);
    if (search.run()) keep_if_better(plan.score());
  };
  const auto refine_start = [&] {
    if (plan.lanes() == best_lanes && plan.streams() == streamed) return;
    if (plan.score().layer_us < best.layer_us * kRefineBelow) keep_if_better(refine(plan));
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
