#include "moe/accelerator.h"

#include <stdexcept>

namespace twofold {

LayerTimes Accelerator::follow(int, const LayerRouting&, const ExpertGroups&, std::span<const Placement>) {
  throw std::logic_error("this accelerator places every layer; it follows none");
}

LayerTimes NoAccelerator::place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                std::span<GroupPlacement> placements) {
  loads_.clear();
  for (int g = 0; g < groups.size(); ++g) {
    placements[size_t(g)] = {store_.expert(layer, groups.experts[size_t(g)]), Placement::kCpu};
    loads_.push_back(groups.load(g));
  }
  deferred_ = {};
  if (deferral_.most() > 0) {
    const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
    on_cpu_.assign(num_pairs, 1);
    deferred_ = deferral_.choose(layer, {routing.weights, num_pairs}, routing.top_k, generated_, on_cpu_);
  }
  LayerTimes times;
  if (cost_) times.layer_us = times.cpu_us = cost_->cpu_us(loads_, 0);
  return times;
}

}  // namespace twofold
