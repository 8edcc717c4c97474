#include "twofold/decode_planner.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "twofold/reject.h"

namespace twofold {

DecodePlanner::DecodePlanner(const CostModel& cost, int max_routed, int num_buckets, double bucket_us,
                             double fetch_cost_us)
    : max_routed_(max_routed),
      num_buckets_(num_buckets),
      bucket_us_(bucket_us > 0 ? bucket_us : cost.upload_us() / 4) {
  if (max_routed < 1 || max_routed > 255) {
    reject("DecodePlanner: max_routed", max_routed, "1 ... 255");
  }
  if (num_buckets < 1) {
    reject("DecodePlanner: num_buckets", num_buckets, ">= 1");
  }
  const size_t side = static_cast<size_t>(max_routed) + 1;
  table_.assign(side * side * static_cast<size_t>(num_buckets), 0);
  const double gpu_us = cost.gpu_expert_us(1);
  const double cpu_us = cost.cpu_expert_us(1);
  const std::vector<double> fetched_us(static_cast<size_t>(max_routed), gpu_us);
  for (int hits = 0; hits <= max_routed; ++hits) {
    for (int misses = 1; hits + misses <= max_routed; ++misses) {
      for (int bucket = 0; bucket < num_buckets; ++bucket) {
        double best = std::numeric_limits<double>::infinity();
        int best_fetches = 0;
        for (int fetches = 0; fetches <= misses; ++fetches) {
          const LayerTimes times = cost.layer_from_sums(
              hits, hits * gpu_us, std::span(fetched_us).first(static_cast<size_t>(fetches)),
              misses - fetches, (misses - fetches) * cpu_us, bucket * bucket_us_, 0, false);
          const double total = times.layer_us + fetches * fetch_cost_us;
          if (total < best) {  // strictly: ties go to fewer fetches
            best = total;
            best_fetches = fetches;
          }
        }
        table_[(static_cast<size_t>(hits) * side + static_cast<size_t>(misses)) *
                   static_cast<size_t>(num_buckets) +
               static_cast<size_t>(bucket)] = static_cast<uint8_t>(best_fetches);
      }
    }
  }
}

int DecodePlanner::split(int hits, int misses, double backlog_us) const {
  if (hits < 0 || misses < 0 || hits + misses > max_routed_) {
    throw std::invalid_argument("DecodePlanner: hits = " + std::to_string(hits) +
                                ", misses = " + std::to_string(misses) +
                                " given, 0 <= hits + misses <= " + std::to_string(max_routed_) + " expected");
  }
  const double bucket = std::round(std::max(0.0, backlog_us) / bucket_us_);
  if (bucket >= num_buckets_) return 0;
  const size_t side = static_cast<size_t>(max_routed_) + 1;
  return table_[(static_cast<size_t>(hits) * side + static_cast<size_t>(misses)) *
                    static_cast<size_t>(num_buckets_) +
                static_cast<size_t>(bucket)];
}

}  // namespace twofold
