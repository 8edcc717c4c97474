#include "growing_plan.h"

#include <array>
#include <span>

namespace twofold {

GrowingPlan::GrowingPlan(const Assignment& plan) : plan_(plan), lanes_(plan.problem().cpu() + 1) {
  for (size_t d = 0; d < plan.problem().cpu(); ++d) {
    GrowingLane& lane = lanes_[d];
    lane.begin_us = device(d).exchange_us() + device(d).profile().gpu_launch_us;
    lane.landed_us = plan.problem().state(d).backlog_us;
    lane.copying_us = std::max(plan.problem().state(d).queued_us, lane.landed_us);
  }
}

GrowingLane GrowingPlan::add(size_t i, size_t to) {
  GrowingLane& lane = lanes_[to];
  const GrowingLane before = lane;
  if (to == plan_.problem().cpu()) {
    if (plan_.problem().item(i).load->deferrable) return before;  // after the layer
    ++lane.count;
    lane.work_us += plan_.problem().item(i).cpu_us;
    return before;
  }
  ++lane.count;
  const double us = plan_.problem().item(i).gpu_us[to];
  lane.work_us += us;
  if (plan_.problem().resident(i, to)) return before;
  const double upload_us =
      device(to).upload_us() -
      (plan_.streams() && lane.num_fetched > 0 ? device(to).profile().link_latency_us : 0.0);
  ++lane.num_fetched;
  lane.landed_us += upload_us;
  lane.copying_us += upload_us;
  lane.chain_us = std::max(lane.chain_us, lane.landed_us) + us;
  return before;
}

double GrowingPlan::end_us() const {
  double end = 0;
  std::array<double, kMostDevices> copying{};
  for (size_t d = 0; d < plan_.problem().cpu(); ++d) {
    end = std::max(end, lanes_[d].end_us());
    copying[d] = lanes_[d].copying_us;
  }
  double busy = 0;
  const GrowingLane& cpu = lanes_[plan_.problem().cpu()];
  return std::max(
      end, plan_.problem().states().cpu_backlog_us +
               plan_.problem().cost().cpu_from_sums(cpu.count, cpu.work_us,
                                                    std::span(copying).first(plan_.problem().cpu()), busy));
}

}  // namespace twofold
