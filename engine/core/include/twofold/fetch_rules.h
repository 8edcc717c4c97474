// Fetch rules of other hybrid engines, for comparison: as published, under our cost model. Not used when
// serving.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "twofold/cost_model.h"
#include "twofold/lane_planner.h"

namespace twofold {

enum class FetchRule {
  kBestSplit,  // Twofold's planners: the split with the shortest predicted layer
  kNone,       // every miss on the CPU
  kMinSum,     // Fiddler: each miss by itself where it is cheaper, without overlap of CPU and link
  kTwoEnded,   // HybriMoE: heaviest misses to the link, lightest to the CPU; the side that would
               // finish first takes the next
  kLinkShare,  // FreeToken: the share link/(link + cpu) of the misses, by bandwidth
  kAll,        // every miss waits for its upload: offloading without CPU compute
};

// "best-split", "none", "min-sum", "two-ended", "link-share", "all"; throws std::invalid_argument listing
// them.
FetchRule fetch_rule_of(const std::string& name);
const char* name_of(FetchRule rule);

// Experts to fetch to the layer's home, in link order, by a peer's rule (not kBestSplit). active: the layer's
// experts.
std::vector<int> peer_fetches(FetchRule rule, const CostModel& cost, std::span<const ExpertLoad> active,
                              double backlog_us);

}  // namespace twofold
