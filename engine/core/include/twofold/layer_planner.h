// The scheduler's plan of a layer: which lane runs each active expert, and which misses are fetched.
#pragma once

#include <span>
#include <vector>

#include "twofold/deferral.h"
#include "twofold/devices.h"
#include "twofold/lane_planner.h"
#include "twofold/stream_ahead.h"

namespace twofold {

class LayerPlanner {
 public:
  LayerPlanner(const CostModel& cost, const LayerSchedulerConfig& config);

  // Fills the decision's experts and the devices' shares. `lanes` gives the CPU's state; generated_rows: per token,
  // see StepShape. Experts that were uploaded ahead are used unless the layer is faster without them.
  void plan(const RoutedLayer& routed, const LaneStates& lanes, std::span<const uint8_t> generated_rows,
            const Devices& devices, StreamAhead& ahead, LayerDecision& decision,
            std::vector<DeviceShare>& shares);
  void recalibrate(const CostModel& cost);

  // Plans and prices of a layer's home.
  const LanePlanner& planner(int layer) const { return planners_[static_cast<size_t>(config_.home(layer))]; }
  const CostModel& cost(int layer) const { return planner(layer).cost(); }
  // The latest plan, and what it was made from.
  std::span<const ExpertLoad> loads() const { return loads_; }
  const LaneStates& lanes() const { return lanes_; }
  const LanePlan& latest() const { return plan_; }
  // Defers pairs of the placed layer. Returns, per expert of the decision, the tokens that the CPU runs after the
  // layer; empty: none.
  std::span<const int> defer(const RoutedLayer& routed, std::span<const uint8_t> generated_rows,
                             LayerDecision& decision);
  // How many misses of a one-token layer to fetch by the fetch rule, [hits][misses] with side top_k + 1, for an
  // idle link; for a device that places its layers itself.
  std::vector<uint8_t> split_table();

 private:
  static std::vector<LanePlanner> planners_of(const CostModel& cost);
  void collect_loads(const RoutedLayer& routed, const Devices& devices);
  // The devices (by bit) where a fetched expert would stay less well than on another. Free slots are filled first. For
  // one token the expert that stays is worth more than what another link saves: barred so, a pair whose second card has
  // no slots decodes no slower than its first alone (else by 0.08 %).
  uint32_t worse_places(int layer, int expert, bool one_token, const Devices& devices) const;
  void mark_deferrable(const RoutedLayer& routed, std::span<const uint8_t> generated_rows);
  LanePlan looked_up();
  LanePlan with_ahead(int layer, const Devices& devices, StreamAhead& ahead);
  LanePlan as_peer(int layer) const;
  void write(int layer, const Devices& devices, const StreamAhead& ahead, LayerDecision& decision,
             std::vector<DeviceShare>& shares) const;
  uint8_t fetched_of(int hits, int misses);

  LayerSchedulerConfig config_;
  std::vector<LanePlanner> planners_;  // by home
  SplitMemo memo_;
  Deferral deferral_;
  std::vector<ExpertLoad> loads_;
  std::vector<DeviceState> states_;
  LaneStates lanes_;
  LanePlan plan_;
  std::vector<int> order_, by_expert_, deferred_tokens_;
  std::vector<uint8_t> all_, on_cpu_;
};

}  // namespace twofold
