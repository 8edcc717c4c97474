#include "moe/accelerator.h"

#include <stdexcept>

namespace twofold {

LayerTimes Accelerator::follow(int, const LayerRouting&, const ExpertGroups&, std::span<const Placement>) {
  throw std::logic_error("this accelerator places every layer; it follows none");
}

LayerTimes NoAccelerator::place(int layer, const LayerRouting&, const ExpertGroups& groups,
                                std::span<GroupPlacement> placements) {
  loads_.clear();
  for (int g = 0; g < groups.size(); ++g) {
    placements[size_t(g)] = {store_.expert(layer, groups.experts[size_t(g)]), Placement::kCpu};
    loads_.push_back(groups.load(g));
  }
  LayerTimes times;
  if (cost_) times.layer_us = times.cpu_us = cost_->cpu_us(loads_, 0);
  return times;
}

}  // namespace twofold
