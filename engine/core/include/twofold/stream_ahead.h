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

#include <optional>
#include <span>
#include <vector>

#include "twofold/cost_model.h"
#include "twofold/expert_cache.h"
#include "twofold/link.h"
#include "twofold/prefill_planner.h"

namespace twofold {

class StreamAhead {
 public:
  // An expert of the current layer that was uploaded ahead; not landed: its upload has begun.
  struct Expert {
    Transfer what;
    bool landed = false;
  };

  StreamAhead(int num_layers, int num_experts, int top_k, int fewest_tokens);

  void begin_step();
  // Begins a layer: takes the uploads made ahead for it from the link; they can be queried until the next layer
  // begins. Uploads that have ended, including failed ones, are added to `arrivals`.
  void begin_layer(int layer, Link& link, std::vector<Upload>& arrivals);
  const Expert* find(int expert) const;
  std::span<const Expert> held() const { return held_; }
  // Discards the held experts unused: their slots are free.
  void discard() { held_.clear(); }
  // The upload into that slot could not begin.
  void refused(int slot);

  // Which experts of the layer after `layer` to upload now, in order; at most num_free. `work` and `times` are
  // the layer's priced work and its price; the link already has its uploads.
  std::vector<int> choose(int layer, int num_tokens, const LayerWork& work, const LayerTimes& times,
                          const CostModel& cost, const PrefillPlanner& planner, ExpertCache& cache,
                          const Link& link, int num_free);
  // Marks one of those uploads as begun.
  void begun(const Transfer& what) { next_.push_back({what, false}); }

  // Records a priced layer: its routing and its end time.
  void observe(int layer, std::span<const int> experts, std::span<const int> loads, int num_tokens,
               double end_us);

 private:
  struct Gap {  // between a layer's end and the next one's beginning, in the latest chunk
    double us = 0;
    int num_tokens = 1;
  };

  float& share(int layer, int expert) {
    return shares_[static_cast<size_t>(layer) * static_cast<size_t>(num_experts_) +
                   static_cast<size_t>(expert)];
  }

  int num_layers_, num_experts_, top_k_, fewest_tokens_;
  std::vector<float> shares_;  // [layers][experts] of a chunk's routed pairs
  std::vector<char> seen_;     // layers whose shares are known
  std::vector<Gap> gaps_;      // [layers] before the layer
  int last_layer_ = -1;
  int last_tokens_ = 0;
  double last_end_us_ = 0;
  std::vector<Expert> held_, next_;
};

}  // namespace twofold
