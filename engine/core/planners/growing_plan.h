// The ends of a layer's lanes while experts are added in descending load.
#pragma once

#include <algorithm>
#include <vector>

#include "assignment.h"

namespace twofold {

// With hits H, fetched experts F and A = the end of the fetched chain alone, a device ends at
// max(A, x + g + H + F): the same as running the hits first.
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
  explicit GrowingPlan(const Assignment& plan);

  bool has_room(size_t i, size_t lane) const {
    const int most = lane < plan_.problem().cpu() ? plan_.problem().state(lane).max_fetch : -1;
    return most < 0 || !plan_.problem().fetches(i, lane) || lanes_[lane].num_fetched < most;
  }
  // Returns the lane as it was, for `restore`.
  GrowingLane add(size_t i, size_t to);
  void restore(size_t lane, const GrowingLane& before) { lanes_[lane] = before; }
  // A lower bound for every plan that continues this one, without the join.
  double end_us() const;
  double lane_end_us(size_t lane) const { return lanes_[lane].end_us(); }

 private:
  const DeviceCost& device(size_t d) const { return plan_.problem().device(d); }

  const Assignment& plan_;
  std::vector<GrowingLane> lanes_;
};

}  // namespace twofold
