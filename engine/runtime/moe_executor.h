// Runs one MoE layer of one step: asks the accelerator where each routed expert runs, computes, and records
// what happened. The one object the model talks to between router and residual.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelerator.h"
#include "event_log.h"
#include "expert_compute.h"
#include "expert_store.h"
#include "slotted_accelerator.h"
#include "thread_team.h"

namespace twofold {

class MoeExecutor {
 public:
  // No accelerator: all experts on the CPU at full speed; with a cost model their time is predicted too.
  MoeExecutor(ThreadTeam& team, const ExpertStore& store, std::optional<CostModel> cost = std::nullopt);
  // preload: upload all experts first (needs a slot for each).
  MoeExecutor(ThreadTeam& team, const ExpertStore& store, std::shared_ptr<SlottedAccelerator> accelerator,
              bool preload);

  // The step's rows: what forward's tokens are called in the events.
  void begin_step(StepRows rows);
  // hidden[t] += weighted sum of token t's experts. normed, hidden: [num_tokens, hidden size]. Throws
  // std::invalid_argument when the number of tokens is not the step's.
  void forward(int layer, const LayerRouting& routing, const float* normed, float* hidden);
  // See Accelerator: whether `predict` is welcome in this step; the call comes before `forward` of the layer
  // before. Throws std::invalid_argument on a wrong shape.
  bool wants_prediction() const { return accelerator_->wants_prediction(); }
  void predict(int layer, std::span<const float> logits, int num_tokens) {
    accelerator_->predict(layer, logits, num_tokens);
  }
  // See Accelerator::save and restore.
  void save_cache(const std::string& path) const { accelerator_->save(path); }
  int restore_cache(const std::string& path) { return accelerator_->restore(path); }

  // A layer that the device placed itself, where[num_tokens * top_k], and that others computed: decides what
  // to upload behind it, and records it; us is how long it took. Nothing of the step waits for this.
  void follow(int layer, const LayerRouting& routing, std::span<const Placement> where, double us);

  // The head's time passes on a virtual clock.
  void end_step();
  void idle() { accelerator_->idle(); }

  EventLog& events() { return events_; }
  const Accelerator& accelerator() const { return *accelerator_; }
  const ExpertStore& store() const { return store_; }

 private:
  // The part of the layer's groups that is chosen, and where their weights are.
  template <typename Choose>
  void take_groups(ExpertGroups& part, std::vector<const std::byte*>& weights, Choose choose);
  void check(int layer, const LayerRouting& routing) const;
  void record(int layer, const LayerRouting& routing, const LayerTimes& times, float measured_us);

  const ExpertStore& store_;
  EventLog events_;
  std::shared_ptr<Accelerator> accelerator_;
  ExpertCompute compute_;
  StepRows rows_;
  ExpertGroups groups_;
  std::vector<GroupPlacement> placements_;
  std::vector<const std::byte*> group_weights_;
  std::vector<uint8_t> where_of_expert_;
  ExpertGroups on_cpu_, on_device_;
  std::vector<const std::byte*> cpu_weights_, device_weights_;
};

}  // namespace twofold
