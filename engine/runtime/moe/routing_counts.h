// How often each expert was routed to and where it ran, counted by layer; complete steps only. The engine
// thread writes and takes.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "moe/event_log.h"
#include "moe/expert_compute.h"
#include "twofold/layer_scheduler.h"

namespace twofold {

enum class RoutingDetail : uint8_t {
  kOff = 0,
  kCounts = 1,
  kTokens = 2  // also the experts of each token of the last step
};

// Each token's experts in one step: [layers, tokens, top_k], and where each ran (Placement).
struct StepRouting {
  StepRows rows;
  int top_k = 0;
  std::vector<uint16_t> experts;
  std::vector<uint8_t> where;
};

class RoutingCounts {
 public:
  RoutingCounts(int num_layers, int num_experts) : num_layers_(num_layers), num_experts_(num_experts) {}

  // Restarts counting, in every n-th step. Between two steps. Throws std::invalid_argument: every < 1.
  void start(RoutingDetail detail, int every);

  void begin_step(const StepRows& rows);
  // where: by expert, valid for those of `groups`.
  void add(int layer, const LayerRouting& routing, const ExpertGroups& groups,
           std::span<const uint8_t> where);
  // Commits the step's layers to the counts; a step that is begun again adds nothing.
  void end_step();

  int num_layers() const { return num_layers_; }
  int num_experts() const { return num_experts_; }
  RoutingDetail detail() const { return detail_; }
  int64_t num_steps() const { return num_steps_; }    // counted since the last take
  int64_t num_tokens() const { return num_tokens_; }  // tokens in num_steps steps
  // [kNumPlacements, layers, experts] since the last take.
  std::vector<int64_t> take();
  // Routing of the last step that ended; without rows if none was counted.
  StepRouting take_step();

 private:
  struct Addition {
    size_t place;
    int load;
  };
  const int num_layers_, num_experts_;
  RoutingDetail detail_ = RoutingDetail::kOff;
  int every_ = 1;
  int64_t num_begun_ = 0, num_steps_ = 0, num_tokens_ = 0;
  bool active_ = false, recorded_ = true;
  int step_tokens_ = 0;
  std::vector<Addition> additions_;  // additions of the current step
  std::vector<int64_t> counts_;
  StepRouting step_, ended_;
};

}  // namespace twofold
