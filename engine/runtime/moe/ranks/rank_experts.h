// A layer's experts over ranks: which rank computes which group, and the job that asks it to.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "moe/expert_groups.h"
#include "moe/expert_store.h"
#include "ops/linear.h"

namespace twofold {

// What one rank computes of a layer.
struct RankGroups {
  ExpertGroups groups;       // with pairs of the whole step
  std::vector<int32_t> job;  // as sent
  std::vector<float> rows;   // [tokens that it gets, hidden]
};

// Divides groups among the ranks that hold their experts. An expert that several ranks hold goes to the one with the
// least work so far; the result does not depend on it. of_ranks has one entry per rank.
void divide_groups(const ExpertStore& store, int layer, const ExpertGroups& groups,
                   std::span<RankGroups> of_ranks);

// Fills job and rows for a rank: of the step's `input`, only the tokens that its pairs name. adapters: of each token; empty:
// none uses one.
void make_job(RankGroups& theirs, int layer, const LayerRouting& routing, const InputRows& input,
              std::span<const int32_t> adapters);

// A job as another rank reads it; pairs count the tokens that were sent.
struct ExpertJob {
  int layer, num_tokens, top_k;
  std::span<const int> experts, begin, pairs;
  std::span<const int> adapters;  // one per token; empty: no token uses an adapter
};

// Throws std::invalid_argument for a damaged job, or one of experts that are not in the store.
ExpertJob read_job(std::span<const int32_t> job, const ExpertStore& store);

}  // namespace twofold
