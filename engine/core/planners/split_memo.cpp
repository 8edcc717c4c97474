#include <cmath>
#include <stdexcept>
#include <string>

#include "twofold/lane_planner.h"
#include "twofold/reject.h"

namespace twofold {

namespace {
constexpr uint8_t kUnknown = 255;
}

SplitMemo::SplitMemo(const CostModel& cost, int max_routed)
    : cost_(cost), max_routed_(max_routed), bucket_us_(cost.device(0).upload_us() / 4) {
  if (max_routed < 1 || max_routed >= kUnknown) {
    reject("SplitMemo: max_routed", max_routed, "1 ... " + std::to_string(kUnknown - 1));
  }
  const size_t side = static_cast<size_t>(max_routed) + 1;
  known_.assign(side * side * side * kNumBuckets, kUnknown);
}

uint8_t SplitMemo::best(int hits, int misses, int in_flight, int bucket) const {
  const DeviceCost& device = cost_.device(0);
  const double gpu_us = device.gpu_expert_us(1), cpu_us = cost_.cpu_expert_us(1);
  const std::vector<double> fetched_us(static_cast<size_t>(misses), gpu_us);
  double least = std::numeric_limits<double>::infinity();
  uint8_t best = 0;
  for (int fetches = 0; fetches <= misses; ++fetches) {
    const DeviceTimes of_device =
        device.times(DeviceSums{.num_hits = hits,
                                .hit_us = hits * gpu_us,
                                .fetched_us = std::span(fetched_us).first(static_cast<size_t>(fetches)),
                                .backlog_us = bucket * bucket_us_});
    const int on_cpu = misses - fetches + in_flight;
    double busy = 0;
    const double of_cpu = cost_.cpu_from_sums(on_cpu, on_cpu * cpu_us, {&of_device.copying_us, 1}, busy);
    const double us = std::max(of_device.gpu_us, of_cpu) + cost_.home().profile().join_us;
    if (us >= least) continue;  // ties go to fewer fetches
    least = us;
    best = static_cast<uint8_t>(fetches);
  }
  return best;
}

int SplitMemo::split(int hits, int misses, int in_flight, double backlog_us) {
  if (hits < 0 || misses < 0 || in_flight < 0 || hits + misses + in_flight > max_routed_) {
    throw std::invalid_argument("SplitMemo: hits = " + std::to_string(hits) + ", misses = " +
                                std::to_string(misses) + ", under way = " + std::to_string(in_flight) +
                                " given, 0 <= their sum <= " + std::to_string(max_routed_) + " expected");
  }
  const double bucket = std::round(std::max(0.0, backlog_us) / bucket_us_);
  if (bucket >= kNumBuckets) return 0;
  const size_t side = static_cast<size_t>(max_routed_) + 1;
  const size_t at = ((static_cast<size_t>(hits) * side + static_cast<size_t>(misses)) * side +
                     static_cast<size_t>(in_flight)) *
                        kNumBuckets +
                    static_cast<size_t>(bucket);
  if (known_[at] == kUnknown) known_[at] = best(hits, misses, in_flight, static_cast<int>(bucket));
  return known_[at];
}

}  // namespace twofold
