// Runs one MoE layer of one step: asks the accelerator where each routed expert runs, computes, and records the
// events. The only object that the model calls between router and residual.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "host/thread_pool.h"
#include "moe/accelerator.h"
#include "moe/correction/layer_correction.h"
#include "moe/deferred_sums.h"
#include "moe/event_log.h"
#include "moe/expert_compute.h"
#include "moe/expert_store.h"
#include "moe/routing_counts.h"
#include "moe/slotted_accelerator.h"

namespace twofold {

// Some of a layer's groups, and the address of each group's weights.
struct PlacedGroups {
  ExpertGroups groups;
  std::vector<const std::byte*> weights;
};

// A device's part of a layer: experts in slots that may be read at once, and those whose uploads are awaited
// (DeviceAccelerator::before_compute).
struct DeviceGroups {
  PlacedGroups ready, awaited;
};

// The work split of one layer.
struct LayerPlan {
  std::vector<DeviceGroups> devices;
  PlacedGroups on_cpu;
  bool joins_deferred = false;   // rows get the previous layer's deferred output
  bool uses_cpu = false;         // compute_cpu has work
  std::vector<Placement> where;  // [num_tokens * top_k]
};

// How long a layer's experts took; negative if unknown.
struct MeasuredTimes {
  double layer_us = -1;
  double cpu_us = -1;    // the CPU's share
  double gpu_us = -1;    // the device's
  double dense_us = -1;  // from the end of the layer before until this one's routing
};

class MoeExecutor {
 public:
  // No accelerator: all experts on the CPU at full speed; with a cost model their time is predicted too.
  MoeExecutor(ThreadPool& pool, const ExpertStore& store, std::optional<CostModel> cost = std::nullopt,
              int num_deferred = 0);
  // preload: first upload all experts that may be in slots (needs one slot for each). first_step: the next one, if the
  // slots replace others; < 0: they are the first.
  MoeExecutor(ThreadPool& pool, const ExpertStore& store, std::shared_ptr<SlottedAccelerator> accelerator,
              bool preload, int64_t first_step = -1);

  // The step's rows: the identity of forward's tokens in the events.
  void begin_step(StepRows rows);
  int num_rows() const { return int(rows_.requests.size()); }
  // hidden[t] += weighted sum of token t's experts, and the previous layer's deferred output (Deferral).
  // normed, hidden: [num_tokens, hidden size]. Throws std::invalid_argument when the number of tokens is not
  // the step's.
  void forward(int layer, const LayerRouting& routing, const float* normed, float* hidden);

  // The same in parts, where the device computes its share: places the layer; computes the CPU's share (rows[t]
  // = weighted sum, 0 where token t has none, and the previous layer's deferred output); records that the layer
  // took us and the work before it dense_us, each negative if unknown. The plan is valid until the next
  // begin_layer. Throws std::logic_error if called out of order.
  const LayerPlan& begin_layer(int layer, const LayerRouting& routing);
  void compute_cpu(const float* normed, float* rows);
  void end_layer(double us, double dense_us = -1);

  // See Accelerator: whether `predict` is used in this step; it is called before `forward` of the previous
  // layer. Throws std::invalid_argument on a wrong shape.
  // For routers: see Accelerator::cache_prior and residents. The prior applies to generated rows only.
  double cache_prior() const { return accelerator_->cache_prior(); }
  std::span<const uint8_t> residents(int layer) { return accelerator_->residents(layer); }
  const StepRows& rows() const { return rows_; }

  bool needs_look_ahead() const { return accelerator_->needs_look_ahead(); }
  void predict(int layer, std::span<const float> logits, int num_tokens) {
    accelerator_->predict(layer, logits, num_tokens);
  }
  // See Accelerator::save and restore.
  void save_cache(const std::string& path) const { accelerator_->save(path); }
  int64_t record_release() { return accelerator_->record_release(); }
  int restore_cache(const std::string& path) { return accelerator_->restore(path); }
  // See Accelerator.
  int place_experts(std::span<const uint8_t> wanted) { return accelerator_->place_experts(wanted); }

  // Follows a layer that the device placed itself, where[num_tokens * top_k], and that was computed elsewhere:
  // decides what to upload after it, and records it with its times. Nothing in the step waits for this.
  void follow(int layer, const LayerRouting& routing, std::span<const Placement> where,
              const MeasuredTimes& times);

  // Advances a virtual clock by the head's time. The results are known by now; see Accelerator::end_step for
  // its exceptions. with_head: false where no logits were computed.
  void end_step(bool with_head = true);
  void idle() { accelerator_->idle(); }

  // Time on a virtual clock; in real time the devices' own measurements, the rest of a step is unknown.
  ClockParts clock_parts() const {
    return accelerator_->virtual_now_us() < 0 ? device_parts_ : accelerator_->clock_parts();
  }

  EventLog& events() { return events_; }
  RoutingCounts& routing_counts() { return routing_counts_; }
  const Accelerator& accelerator() const { return *accelerator_; }
  const ExpertStore& store() const { return store_; }

 private:
  void place(int layer, const LayerRouting& routing);
  template <typename Choose>
  void take_groups(PlacedGroups& part, Choose choose) const;
  // Fills later_ with the deferred part of the layer just placed.
  void take_deferred();
  void compute_deferred(int layer, const LayerRouting& routing, const float* normed);
  const LayerRouting& expect_begun(const char* call) const;
  void check(int layer, const LayerRouting& routing) const;
  // The layer's time before it runs; in real time corrected by previous layers. 0: not known.
  double predicted(int layer, const LayerRouting& routing, const LayerTimes& times) const;
  void keep_parts(double layer_us, double cpu_us, double dense_us);
  void record(int layer, const LayerRouting& routing, const LayerTimes& times, double predicted_us,
              const MeasuredTimes& measured);

  const ExpertStore& store_;
  EventLog events_;
  RoutingCounts routing_counts_;
  std::shared_ptr<Accelerator> accelerator_;
  LayerCorrection correction_;
  ExpertCompute compute_;
  StepRows rows_;
  ExpertGroups groups_;
  std::vector<GroupPlacement> placements_;
  std::vector<const std::byte*> group_weights_;
  std::vector<uint8_t> where_of_expert_, device_of_expert_;
  // The layer that was begun and has not ended; -1: none.
  int layer_ = -1;
  double host_us_ = 0;  // time of its compute_cpu
  ClockParts device_parts_;
  LayerTimes times_;
  double estimated_us_ = 0;
  LayerPlan plan_;
  PlacedGroups now_, later_;
  DeferredSums deferred_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  LayerRouting routing_{};
};

}  // namespace twofold
