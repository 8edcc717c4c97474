// Streams prefill ahead: while one layer of a large chunk computes, experts that the next layer will need are
// uploaded into staging slots that the layer itself does not use, so that the link works on through attention
// and through the layer's last kernels. Which experts that will be is not known yet; a chunk so large that an
// expert gets several tokens if it is liked as it was in the chunks before will hardly do without it.
//
// Only link time that nobody wants is used: an upload is begun ahead where the plan of the next layer, made
// for expected loads, would fetch the expert anyway, where it is expected to land before that layer begins,
// and where it does not slow the CPU's experts of the layer under way by the cost model. So in simulation a
// chunk is never slower for it; what is gained is the time in which the link would have been idle.
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
  // An expert of the layer under way that was uploaded ahead; not landed: its upload has begun.
  struct Expert {
    Transfer what;
    bool landed = false;
  };

  StreamAhead(int num_layers, int num_experts, int top_k, int fewest_tokens);

  void begin_step();
  // The layer begins: what was uploaded ahead for it is taken from the link and can be asked for until the
  // next one begins. Uploads that have ended, failed ones too, are added to `arrivals`.
  void begin_layer(int layer, Link& link, std::vector<Upload>& arrivals);
  const Expert* find(int expert) const;
  std::span<const Expert> held() const { return held_; }
  // Nobody uses them: their slots are free.
  void give_up() { held_.clear(); }
  // The upload into that slot could not begin.
  void refused(int slot);

  // Which experts of the layer after `layer` to upload now, in order; at most num_free. `work` is what the
  // layer was priced by, `times` its price, the link has its uploads already.
  std::vector<int> choose(int layer, int num_tokens, const LayerWork& work, const LayerTimes& times,
                          const CostModel& cost, const PrefillPlanner& planner, ExpertCache& cache,
                          const Link& link, int num_free);
  // One of those is on its way.
  void begun(const Transfer& what) { next_.push_back({what, false}); }

  // The layer is priced: what its routing was, and when it will have ended.
  void observe(int layer, std::span<const int> experts, std::span<const int> loads, int num_tokens,
               double end_us);

 private:
  struct Gap {  // between a layer's end and the next one's begin, in the chunk seen last
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
