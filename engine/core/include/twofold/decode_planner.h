// Decode plans. The misses of one layer at one token each are interchangeable, so a plan is one number: how
// many of them to fetch. The best number for every (hits, misses, backlog) is computed once by exhaustive
// search; a step looks it up.
#pragma once

#include <cstdint>
#include <vector>

#include "twofold/cost_model.h"

namespace twofold {

class DecodePlanner {
 public:
  // max_routed: most experts active in one layer of one step. Backlog is rounded to the nearest of
  // num_buckets multiples of bucket_us (0: a quarter of an upload); beyond the last one nothing is fetched.
  // fetch_cost_us: added to each fetch beyond the layer's time (the cost of an upload to later work; may be
  // negative when a fetched expert is worth keeping).
  DecodePlanner(const CostModel& cost, int max_routed, int num_buckets = 32, double bucket_us = 0,
                double fetch_cost_us = 0);

  // 0 ... misses; ties go to fewer fetches. O(1). Throws std::invalid_argument outside 0 <= hits + misses <=
  // max_routed.
  int split(int hits, int misses, double backlog_us) const;

  int max_routed() const { return max_routed_; }
  int num_buckets() const { return num_buckets_; }
  double bucket_us() const { return bucket_us_; }
  // [hits][misses][bucket], (max_routed + 1)^2 * num_buckets entries, for lookups on a device.
  const std::vector<uint8_t>& table() const { return table_; }

 private:
  int max_routed_;
  int num_buckets_;
  double bucket_us_;
  std::vector<uint8_t> table_;
};

}  // namespace twofold
