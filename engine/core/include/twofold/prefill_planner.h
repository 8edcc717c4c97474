// Plans for layers whose experts carry unequal loads: prefill chunks and batched decode. Resident experts
// stay on the accelerator; every other active expert is either fetched or run by the CPU.
//
// Fetched experts pass two stages of equal link time each, so the best order is descending load (Johnson's
// rule). The fetch set: every split of the load-sorted list is tried (heavy end to the accelerator, light end
// to the CPU), then single moves and swaps refine the best one. All-CPU and all-fetch are among the splits, so
// the plan is never worse than either.
#pragma once

#include <span>
#include <vector>

#include "twofold/cost_model.h"

namespace twofold {

struct ExpertLoad {
  int expert = 0;
  int tokens = 0;
  bool resident = false;
};

struct PrefillPlan {
  std::vector<int> resident;  // run by the accelerator from their slots
  std::vector<int> fetch;     // upload in this order, then run by the accelerator
  std::vector<int> cpu;
  bool streamed = false;  // the fetched experts travel as one transfer: the whole layer is streamed
  LayerTimes times;
};

class PrefillPlanner {
 public:
  explicit PrefillPlanner(const CostModel& cost) : cost_(cost) {}

  // loads: active experts only (tokens >= 1). max_fetch: room for fetched experts, < 0 for no limit;
  // streaming needs room for all misses. Throws std::invalid_argument on a load below 1.
  PrefillPlan plan(std::span<const ExpertLoad> loads, double backlog_us, double queued_us = 0,
                   int max_fetch = -1) const;

 private:
  CostModel cost_;
};

}  // namespace twofold
