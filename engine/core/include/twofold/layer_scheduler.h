// Decides one MoE layer of one step: where each routed expert runs, what is uploaded, what is evicted, and how
// long the layer takes on the links' clock:
//
//   observe → plan → place → price → move → look ahead
//
// Each step is a class of its own; this one calls them in order. The links are provided by the caller: a Timeline
// plays the uploads on a virtual clock, so the emulated accelerator and the lab's simulator give the same times; a
// real-time link carries out the same decisions on a GPU.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "twofold/deferral.h"
#include "twofold/devices.h"
#include "twofold/dynamic_update.h"
#include "twofold/expert_market.h"
#include "twofold/layer_planner.h"
#include "twofold/layer_pricer.h"
#include "twofold/prefetcher.h"
#include "twofold/slot_placer.h"
#include "twofold/stream_ahead.h"

namespace twofold {

class LayerScheduler {
 public:
  // links: one for each device of the cost model, all on one clock; they must outlive it. Throws
  // std::invalid_argument with field, value and expectation.
  LayerScheduler(CostModel cost, LayerSchedulerConfig config, std::span<Link* const> links);

  // Step boundary: landed uploads become usable, failed ones are forgotten. The span and the shape are valid
  // until the next call; the shape's rows are the tokens of every decide.
  std::span<const Publication> begin_step(StepShape shape = {});
  // Decides and plays the layer; on return the clock is at its end.
  const LayerDecision& decide(const RoutedLayer& routed);
  // Records a layer that the home device placed itself, from what was published at the step's beginning:
  // where[num_tokens * top_k]. Learns from its routing and decides only what to upload after it; nothing is
  // fetched, and the returned experts have slot -1.
  const LayerDecision& follow(const RoutedLayer& routed, std::span<const Placement> where);
  // Takes the logits that a later layer's router computes from the current residual: logits[num_tokens *
  // num_experts]. Only with config.prefetch; uploads are decided in the decide of the layer before.
  void predict(int layer, std::span<const float> logits, int num_tokens);
  // For a step that the device places with one layer of lookahead. Called once the layer is placed and the next
  // one predicted, long before follow: returns what is uploaded ahead during the layer's work (moves).
  const LayerDecision& look_ahead(int layer, std::span<const int32_t> ids, std::span<const Placement> where);
  // Called as late as the layer can still use it: returns what has landed for it (arrivals) and withdraws what
  // has not begun.
  const LayerDecision& settle_ahead(int layer);
  // Reports that the device refused to begin an upload ahead into that slot.
  void ahead_refused(int device, int slot) { ahead_.refused(device, slot); }
  // Fills free slots at start from prior_usage.
  void preload_by_usage() { twofold::preload_by_usage(planner_, config_.prior_usage, devices_); }
  // Replaces the machine's figures: plans and prices follow them from now on, except an upload price that the
  // configuration set.
  void recalibrate(CostModel cost);
  // Bytes that adapters add to each expert in the steps from now on (cost_model.h).
  void set_adapter_bytes(double bytes);
  // See LayerPlanner.
  std::vector<uint8_t> split_table() { return planner_.split_table(); }

  const CostModel& cost() const { return cost_; }
  const LayerSchedulerConfig& config() const { return config_; }
  // The links' clock: a virtual one is advanced by work outside the experts (attention, head).
  Devices& devices() { return devices_; }
  const Devices& devices() const { return devices_; }
  bool prefetches() const { return prefetcher_.has_value(); }
  SchedulerCounts counts() const {
    return {prefetcher_ ? prefetcher_->counts() : PrefetchCounts{}, dynamic_update_.counts()};
  }

 private:
  void observe(const RoutedLayer& routed);
  // From pricing on: queues the moves and advances the clock past the layer.
  const LayerDecision& play(const RoutedLayer& routed);

  CostModel cost_;
  LayerSchedulerConfig config_;
  Devices devices_;
  LayerPlanner planner_;
  SlotPlacer placer_;
  LayerPricer pricer_;
  ExpertMarket market_;
  DynamicUpdate dynamic_update_;
  StreamAhead ahead_;
  std::optional<Prefetcher> prefetcher_;

  StepShape shape_;
  bool looks_ahead_ = false;  // this step calls look_ahead and settle_ahead, so follow does not prefetch
  double layer_end_us_ = 0, gap_us_ = 0;  // end of the last layer, and time from there to the next one
  double cpu_free_us_ = 0;                // when the CPU finishes the deferred experts, on the links' clock
  LayerDecision decision_;
  std::vector<DeviceShare> shares_;
  std::vector<Publication> publications_;
  std::vector<int> tokens_;  // tokens per expert
};

}  // namespace twofold
