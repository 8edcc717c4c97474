// Streams prefill ahead: while one layer of a large chunk computes, experts of the next layer are uploaded into
// staging slots that the current layer does not use, so that the link stays busy through attention and the
// layer's last kernels. The next layer's routing is not known yet. Experts are chosen by their share in earlier
// chunks: in a chunk large enough to give such an expert several tokens, the layer almost certainly needs it.
//
// Only idle link time is used. An upload is begun ahead if three conditions hold: the plan of the next layer,
// made for expected loads, would fetch the expert anyway; the upload is expected to land before that layer
// begins; and by the cost model it does not slow the CPU's experts of the current layer. So in simulation a
// chunk is never slower with it; the gain is the link's former idle time.
#pragma once

#include <span>
#include <vector>

#include "twofold/devices.h"
#include "twofold/layer_pricer.h"

namespace twofold {

class LayerPlanner;
struct DeviceLane;

class StreamAhead {
 public:
  // An expert of the current layer that was uploaded ahead; not landed: its upload has begun.
  struct Expert {
    Transfer what;
    int device = 0;
    bool landed = false;
  };

  // Never uploads ahead without staging slots, under another engine's fetch rule, or if the configuration says so.
  explicit StreamAhead(const LayerSchedulerConfig& config);

  void begin_step();
  // Begins a layer: takes the uploads made ahead for it from the links; they can be queried until the next layer
  // begins. Uploads that have ended, including failed ones, are added to `arrivals`.
  void begin_layer(int layer, Devices& devices, std::vector<Publication>& arrivals);
  bool holds_any() const { return !held_.empty(); }
  const Expert* find(int expert) const;
  // Discards the held experts unused: their slots are free.
  void discard() { held_.clear(); }
  // The upload into that slot could not begin.
  void refused(int device, int slot);

  // Uploads experts of the next layer into staging slots. The decision is priced, and the links already have its
  // uploads; it gets the further moves, and its times their contention.
  void upload(const RoutedLayer& routed, const LayerPlanner& planner, LayerPricer& pricer, Devices& devices,
              LayerDecision& decision);

 private:
  struct Gap {  // between a layer's end and the next one's beginning, in the latest chunk
    double us = 0;
    int num_tokens = 1;
  };

  float& share(int layer, int expert) {
    return shares_[static_cast<size_t>(layer) * static_cast<size_t>(num_experts_) +
                   static_cast<size_t>(expert)];
  }
  // The next layer's experts that its plan would fetch to each device.
  std::vector<DeviceLane> expected_plan(int next, int num_tokens, const LayerPlanner& planner,
                                        const Devices& devices);
  void choose(const RoutedLayer& routed, const LayerPlanner& planner, LayerPricer& pricer,
              const LayerDecision& decision, const Devices& devices);
  // Chooses as many of these experts as do not slow the layer, for staging slots that it does not use.
  void choose_for(int device, int layer, std::span<const int> experts, LayerPricer& pricer,
                  const CostModel& cost, const LayerDecision& decision, const Devices& devices);
  // Records a priced layer: its routing and its end time.
  void observe(const RoutedLayer& routed, const Devices& devices, double end_us);

  int num_layers_, num_experts_, top_k_, fewest_tokens_;
  bool is_on_;
  std::vector<float> shares_;  // [layers][experts] of a chunk's routed pairs
  std::vector<char> seen_;     // layers whose shares are known
  std::vector<Gap> gaps_;      // [layers] before the layer
  int last_layer_ = -1;
  int last_tokens_ = 0;
  double last_end_us_ = 0;
  std::vector<Expert> held_, next_;
};

}  // namespace twofold
