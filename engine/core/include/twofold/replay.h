// Replays recorded routing through an ExpertCache: event-atomic (a layer's whole routing is known before any
// decision), without time (an upload is usable at the next event of its layer). Reports hits and uploads, not
// tokens/s: for those see simulation.h.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "twofold/expert_cache.h"

namespace twofold {

// Recorded routing of decode tokens. ids and weights are [num_tokens][num_layers][top_k]; sequence i is the
// tokens offsets[i] ... offsets[i + 1] - 1. Views only.
struct RoutingTrace {
  int64_t num_tokens = 0;
  int num_layers = 0;
  int num_experts = 0;
  int top_k = 0;
  std::span<const uint16_t> ids;
  std::span<const float> weights;  // empty where unknown
  std::span<const int64_t> offsets;

  // Throws std::invalid_argument: shapes that disagree, offsets out of order, ids beyond num_experts, one
  // expert routed twice by one token.
  void validate() const;
};

// Steps of `batch` sequences decoded at once: lane i takes the next sequence when its own ends. Empty lanes
// at the end stay empty, so every token is played exactly once.
class BatchSchedule {
 public:
  BatchSchedule(const RoutingTrace& trace, int batch);
  // Token rows of the next step; false at the end. num_started: sequences that begin with this step.
  bool next(std::vector<int64_t>& rows, int& num_started);

 private:
  const RoutingTrace& trace_;
  size_t next_sequence_ = 0;
  std::vector<int64_t> row_, end_;
};

// Routing of the given tokens in one layer, as one event.
class EventReader {
 public:
  explicit EventReader(const RoutingTrace& trace) : trace_(trace) {}
  void read(const std::vector<int64_t>& rows, int layer);
  std::vector<int> distinct() const;  // of ids, ascending

  std::vector<int32_t> ids;
  std::vector<float> weights;  // empty where the trace has none

 private:
  const RoutingTrace& trace_;
};

struct ReplayCounts {
  int64_t num_steps = 0;
  int64_t num_tokens = 0;
  int64_t num_events = 0;  // token-layer events: tokens * layers
  int64_t num_hits = 0;    // distinct active experts per layer and step that were resident
  int64_t num_misses = 0;
  int64_t num_uploads = 0;
  int64_t num_evictions = 0;
};

// One cache decision, for on_decision.
struct ReplayDecision {
  int64_t step = 0;
  int layer = 0;
  int expert = 0;
  bool hit = false;
  bool uploaded = false;
  int evicted = -1;
  double value = 0;
  double victim_value = 0;
};

// Active experts of every coming event, per layer: the input of offline policies.
std::vector<std::vector<std::vector<int>>> future_of(const RoutingTrace& trace, int batch);

// Offline policies first receive the future of exactly this replay. on_decision may be empty.
ReplayCounts replay(const RoutingTrace& trace, int batch, ExpertCache& cache,
                    const std::function<void(const ReplayDecision&)>& on_decision = {});

}  // namespace twofold
