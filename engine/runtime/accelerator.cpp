#include "accelerator.h"

namespace twofold {

LayerTimes NoAccelerator::place(int layer, const LayerRouting&, const ExpertGroups& groups,
                                std::span<GroupPlacement> placements) {
  for (int g = 0; g < groups.size(); ++g) {
    placements[size_t(g)] = {store_.expert(layer, groups.experts[size_t(g)]), Placement::kCpu};
  }
  return {};
}

}  // namespace twofold
