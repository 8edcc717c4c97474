#include "twofold/layer_decision.h"

#include <algorithm>

namespace twofold {

void LayerDecision::begin(int of_layer, double now_us) {
  layer = of_layer;
  experts.clear();
  deferred = {};
  moves.clear();
  rejection.reset();
  arrivals.clear();
  withdrawn.clear();
  start_us = now_us;
}

Move& LayerDecision::add_move(int of_layer, int expert, int device, const Admission& admission,
                              UploadReason reason) {
  Move& move = moves.emplace_back();
  move.layer = of_layer;
  move.expert = expert;
  move.device = device;
  move.reason = reason;
  move.take(admission);
  return move;
}

ExpertDecision* LayerDecision::find(int expert) {
  const auto at = std::lower_bound(experts.begin(), experts.end(), expert,
                                   [](const ExpertDecision& e, int wanted) { return e.expert < wanted; });
  return at != experts.end() && at->expert == expert ? &*at : nullptr;
}

}  // namespace twofold
