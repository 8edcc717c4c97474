// Runs routed experts on the CPU, tokens grouped by expert. The caller decides where an expert's weights are
// read from; the result does not depend on it.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "host/thread_pool.h"
#include "moe/expert_store.h"
#include "moe/ranks/rank_experts.h"
#include "ops/packed_ffn.h"

namespace twofold {

class ExpertCompute {
 public:
  // rounding: kOfDevice where a device computes other experts of the same layers (rounding.h).
  ExpertCompute(ThreadPool& pool, const ExpertStore& store, kernels::Rounding rounding)
      : pool_(pool), store_(store), rounding_(rounding) {}

  // hidden[t] += sum over rank k of weights[t, k] * expert(normed[t]), added in rank order; pairs in no group
  // are left out. group_weights[g] points to the packed weights of group g, in its expert's layout in the store,
  // whose kernels it uses too. normed and hidden are [num_tokens, hidden]. Where ranks share the store's experts, each
  // computes its own, whatever group_weights are.
  void run(int layer, const LayerRouting& routing, const ExpertGroups& groups,
           std::span<const std::byte* const> group_weights, const float* normed, float* hidden);

  // A job of rank 0 (make_job, in rank_experts.h) for rows [tokens, hidden]: outputs [pairs, hidden], group after group.
  // Throws std::invalid_argument for a job of experts that are not here.
  std::span<const float> run_job(std::span<const int32_t> job, const float* rows);

 private:
  // The feed-forward of these experts, which have one size.
  PackedFfn& ffn_of(int layer, std::span<const int> experts);
  // Sets panels_ and formats_ of the groups of a layer. weights: as group_weights; empty: the store's.
  void open_groups(int layer, std::span<const int> experts, std::span<const std::byte* const> weights = {});
  // run, of experts of one size.
  void run_alike(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                 std::span<const std::byte* const> group_weights, const float* normed, float* hidden);
  // run_alike, where ranks share the experts.
  void run_over_ranks(int layer, const LayerRouting& routing, const ExpertGroups& groups, const float* normed,
                      float* hidden);

  ThreadPool& pool_;
  const ExpertStore& store_;
  kernels::Rounding rounding_;
  // One per level and size: layers share buffers and plans.
  std::map<std::pair<const kernels::KernelTable*, int>, PackedFfn> ffns_;
  ExpertGroups alike_;  // a layer's groups of one size, where there are two
  std::vector<FfnPanels> panels_;
  std::vector<FfnFormats> formats_;  // as PackedFfn::run takes them
  std::vector<RankGroups> of_ranks_;
  std::vector<int> elsewhere_;
  std::vector<float> outputs_;
};

}  // namespace twofold
