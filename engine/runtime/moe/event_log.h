// Rings of the executor's events and their totals. The engine thread writes; Python drains.
#pragma once
#include <cstdint>
#include <vector>

#include "moe/events.h"
#include "twofold/counters.h"
#include "twofold/event_ring.h"

namespace twofold {

// Which request and position each row of the step's batch belongs to.
struct StepRows {
  int64_t step = 0;
  std::vector<int64_t> requests;
  std::vector<int32_t> positions;
  std::vector<uint8_t> generated = {};  // per row: generated, not prompt; empty: unknown
  std::vector<uint8_t> verified = {};   // per row: a next token or draft that is verified; empty: none
  bool is_recorded = true;  // false: a drafter's pass, whose routing belongs to no step of the model
  std::vector<uint8_t> pictures = {};  // per row: routed to experts of pictures; empty: none is
};

struct EventLog {
  int64_t num_expert_runs = 0;  // distinct experts of each layer and step, summed
  EventRing<TokenLayerEvent> token_layers{1 << 16};
  EventRing<UploadEvent> uploads{1 << 15};
  EventRing<CacheEvent> cache_events{1 << 16};
  PlacementCounts counts;
  // Off: events cost nothing. Counts are kept in both cases.
  bool enabled = true;
};

}  // namespace twofold
