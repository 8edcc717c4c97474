#include "moe/expert_groups.h"

#include <stdexcept>
#include <string>

namespace twofold {

void ExpertGroups::assign(const LayerRouting& routing, int num_experts) {
  const int num_pairs = routing.num_tokens * routing.top_k;
  counts_.assign(size_t(num_experts), 0);
  for (int p = 0; p < num_pairs; ++p) {
    const int expert = routing.ids[p];
    if (expert < 0 || expert >= num_experts) {
      throw std::out_of_range("routed to expert " + std::to_string(expert) + " of " +
                              std::to_string(num_experts));
    }
    ++counts_[size_t(expert)];
  }
  experts.clear();
  begin.assign(1, 0);
  for (int e = 0; e < num_experts; ++e) {
    if (counts_[size_t(e)] == 0) continue;
    experts.push_back(e);
    begin.push_back(begin.back() + counts_[size_t(e)]);
    counts_[size_t(e)] = begin[begin.size() - 2];  // from here on: where the expert's next pair goes
  }
  pairs.resize(size_t(num_pairs));
  for (int p = 0; p < num_pairs; ++p) pairs[size_t(counts_[size_t(routing.ids[p])]++)] = p;
}

}  // namespace twofold
