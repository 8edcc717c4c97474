// Runs routed experts on the CPU, tokens grouped by expert. The caller decides where an expert's weights are
// read from; the result does not depend on it.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "host/thread_pool.h"
#include "moe/expert_store.h"
#include "ops/packed_ffn.h"

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

class ExpertCompute {
 public:
  // rounding: kOfDevice where a device computes other experts of the same layers (rounding.h).
  ExpertCompute(ThreadPool& pool, const ExpertStore& store, kernels::Rounding rounding)
      : pool_(pool), store_(store), rounding_(rounding) {}

  // hidden[t] += sum over rank k of weights[t, k] * expert(normed[t]), added in rank order; pairs in no group
  // are left out. group_weights[g] points to the packed weights of group g, in the layer's layout in the store,
  // whose kernels it uses too. normed and hidden are [num_tokens, hidden].
  void run(int layer, const LayerRouting& routing, const ExpertGroups& groups,
           std::span<const std::byte* const> group_weights, const float* normed, float* hidden);

 private:
  PackedFfn& ffn_of(int layer);

  ThreadPool& pool_;
  const ExpertStore& store_;
  kernels::Rounding rounding_;
  std::map<const kernels::KernelTable*, PackedFfn> ffns_;  // one per level: layers share buffers and plans
  std::vector<FfnPanels> panels_;
};

}  // namespace twofold
