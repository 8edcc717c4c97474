// Uploads experts for a later layer, predicted by that layer's own router from the current residual.
//
// A proposal (layer, expert, probability) becomes an upload if and only if
//   p * stall saved + what having it is worth later - what its victim is worth > price of the upload,
// in microseconds of the cost model, and only in idle link time: it queues after every demand upload and
// admission, and begins only if it can end before its layer does. So it delays no demand upload as long as
// layers do not follow each other faster than measured; otherwise the delay is at most that difference.
//
// Probabilities are learned online, per layer, from a candidate's margin: its logit minus the border of the
// top-k. Nothing is trained. A layer that cannot be predicted soon gets no prefetches.
// LayerScheduler calls it; it plans and plays nothing itself. The only clock it uses is the link's.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "twofold/counters.h"
#include "twofold/devices.h"

namespace twofold {

// An expert expected in a later layer.
struct Proposal {
  int layer = 0;
  int expert = 0;
  double probability = 0;
};

// A prefetch that took a slot; its upload waits in the background lane.
struct Prefetch {
  int layer = 0;
  int expert = 0;
  int device = 0;
  int slot = 0;
};

class Prefetcher {
 public:
  Prefetcher(const CostModel& cost, int num_layers, int num_experts, int top_k);

  // Takes the logits of `layer`'s router on an earlier layer's residual: logits[num_tokens * num_experts].
  // Replaces the layer's previous prediction. Throws std::invalid_argument on a wrong shape.
  void predict(int layer, std::span<const float> logits, int num_tokens, Devices& devices);
  // The decision's layer begins: landed prefetches become usable, those that have not begun are withdrawn, and
  // their slots are free again.
  void begin_layer(Devices& devices, LayerDecision& decision);
  // Takes the layer's true routing: measures and learns.
  void observe(int layer, std::span<const int32_t> ids, int num_tokens);
  // Called when the decision's layer does `work` and the clock is at its start, after its other uploads: a prefetch
  // takes only idle link time. Takes slots for experts that are worth it and land in time, and uploads each; the
  // layer's times then have the contention of these copies.
  void issue(const LayerWork& work, Devices& devices, LayerDecision& decision);
  void recalibrate(const CostModel& cost);
  // Starts a new step and discards the state of an unfinished one.
  void begin_step();

  const PrefetchCounts& counts() const { return counts_; }
  // Learned probability that a candidate at this distance from the top-k's border (in logits) is routed.
  double probability(int layer, double margin) const;
  // When `target` will begin if `layer` ends at end_us, from the shortest recent times of layers and gaps.
  double begin_of(int target, int layer, double end_us) const;

 private:
  static constexpr int kMarginBuckets = 12;
  struct Candidate {
    int row = 0;
    int expert = 0;
    int bucket = 0;
    bool top = false;  // among the row's top-k
  };
  struct LookAhead {
    bool valid = false;
    std::vector<Candidate> candidates;
    std::vector<Proposal> proposals;  // best first, one per expert
    std::vector<uint8_t> absent;      // [experts] when predicted
    int num_hits = 0;                 // resident experts predicted in the top-k
    int num_misses = 0;               // other experts predicted in the top-k
  };
  struct Tally {
    double tried = 0;
    double routed = 0;
  };
  static int margin_bucket(double margin);
  // A proposal's best device: what the upload there is worth beyond its price, and the layer's times with it.
  struct Offer {
    int device = -1;
    bool is_late = false;  // it pays, but could not land in time
    double gain_us = 0;
    LayerTimes times;
  };
  Offer best_offer(const Proposal& proposal, const LookAhead& look_ahead, double deadline_us,
                   const LayerTimes& times, Devices& devices);
  std::vector<double> stalls_of(const DeviceCost& device) const;
  double stall_saved_us(int device, const LookAhead& look_ahead) const;
  double gain_us(const Proposal& proposal, const Admission& admission, double saved_us, int device,
                 const ExpertCache& cache) const;
  Tally& tally(int layer, int bucket) {
    return tallies_[static_cast<size_t>(layer) * kMarginBuckets + static_cast<size_t>(bucket)];
  }

  CostModel cost_;
  int num_experts_;
  int top_k_;
  std::vector<std::vector<double>> stall_us_;  // by device: [hits][misses] of the best split, one token each
  std::vector<Tally> tallies_;                 // [layers][buckets]
  std::vector<double> gap_us_;                 // before each layer: since the layer before ended; < 0 unknown
  std::vector<double> layer_us_;               // < 0 unknown
  double last_end_us_ = -1;
  std::vector<LookAhead> look_aheads_;
  std::vector<Prefetch> in_flight_;
  struct Due {
    int layer;
    int expert;
    bool landed;
  };
  std::vector<Due> due_;  // prefetches for layers that have begun, until those layers are observed
  PrefetchCounts counts_;
  std::vector<int> order_, expected_;
  std::vector<uint8_t> marks_;
  std::vector<double> absent_probability_;
  std::vector<DeviceWork> shared_;  // the layer's work with the prefetches issued so far
  LayerWork shared_work_;
};

}  // namespace twofold
