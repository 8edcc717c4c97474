// Tokens of one layer grouped by the expert that they are routed to.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace twofold {

// The routing of one layer and step. ids and weights are [num_tokens, top_k], row-major.
struct LayerRouting {
  const int32_t* ids;
  const float* weights;
  int num_tokens;
  int top_k;
};

// Tokens of one layer grouped by expert (a counting sort): group g holds pairs [begin[g], begin[g + 1]) of
// `pairs`, where a pair p is token p / top_k at rank p % top_k. Groups are in ascending order of expert.
struct ExpertGroups {
  std::vector<int> experts;
  std::vector<int> begin;
  std::vector<int> pairs;

  int size() const { return int(experts.size()); }
  int load(int group) const { return begin[size_t(group) + 1] - begin[size_t(group)]; }
  // Throws std::out_of_range when an id is not below num_experts.
  void assign(const LayerRouting& routing, int num_experts);

 private:
  std::vector<int> counts_;
};

}  // namespace twofold
