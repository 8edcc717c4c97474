#include "moe/expert_compute.h"

#include <algorithm>
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

PackedFfn& ExpertCompute::ffn_of(int layer, std::span<const int> experts) {
  const kernels::KernelTable& table = store_.kernels(layer);
  const ExpertShape& shape = store_.shape();
  const int inner = experts.empty() ? shape.intermediate : store_.layout(layer, experts.front()).intermediate;
  return ffns_.try_emplace({&table, inner}, table, pool_, shape.hidden, inner, rounding_, shape.activation)
      .first->second;
}

void ExpertCompute::open_groups(int layer, std::span<const int> experts,
                                std::span<const std::byte* const> weights) {
  panels_.clear();
  formats_.clear();
  bool is_uniform = true;
  for (size_t g = 0; g < experts.size(); ++g) {
    const ExpertLayout& layout = store_.layout(layer, experts[g]);
    panels_.push_back(layout.panels(weights.empty() ? store_.expert(layer, experts[g]) : weights[g]));
    if (const ExpertAdapters* const adapters = store_.adapted.of(layer, experts[g])) {
      panels_.back().gate_adapters = &adapters->gate;
      panels_.back().up_adapters = &adapters->up;
      panels_.back().down_adapters = &adapters->down;
    }
    formats_.push_back(layout.formats);
    is_uniform = is_uniform && &layout == &store_.layout(layer, experts[0]);
  }
  if (is_uniform) formats_.resize(std::min<size_t>(formats_.size(), 1));
}

// A token's experts are of one size, so its outputs are added up in one run.
void ExpertCompute::run(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                        std::span<const std::byte* const> group_weights, const float* normed, float* hidden) {
  const auto inner = [&](int group) {
    return store_.layout(layer, groups.experts[size_t(group)]).intermediate;
  };
  int first = 0, end = groups.size();
  if (store_.shape().second_half != 0)
    while (end > 1 && inner(end - 1) != inner(0)) --end;
  if (end == groups.size()) return run_alike(layer, routing, groups, group_weights, normed, hidden);
  for (; first < groups.size(); first = end, end = groups.size()) {
    const int row = groups.begin[size_t(first)];
    alike_.experts.assign(groups.experts.begin() + first, groups.experts.begin() + end);
    alike_.begin.clear();
    for (int g = first; g <= end; ++g) alike_.begin.push_back(groups.begin[size_t(g)] - row);
    alike_.pairs.assign(groups.pairs.begin() + row, groups.pairs.begin() + row + alike_.begin.back());
    run_alike(layer, routing, alike_, group_weights.subspan(size_t(first), size_t(end - first)), normed,
              hidden);
  }
}

void ExpertCompute::run_alike(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                              std::span<const std::byte* const> group_weights, const float* normed,
                              float* hidden) {
  if (store_.ranks() != nullptr) return run_over_ranks(layer, routing, groups, normed, hidden);
  PackedFfn& ffn = ffn_of(layer, groups.experts);
  open_groups(layer, groups.experts, group_weights);
  ffn.run(formats_,
          {.groups = panels_,
           .begin = groups.begin,
           .pairs = groups.pairs,
           .num_tokens = routing.num_tokens,
           .top_k = routing.top_k,
           .weights = routing.weights,
           .adapters = store_.adapted.of_rows(routing.num_tokens)},
          {.x = normed, .ld = ffn.hidden()}, hidden);
}

void ExpertCompute::run_over_ranks(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                   const float* normed, float* hidden) {
  Ranks& ranks = *store_.ranks();
  PackedFfn& ffn = ffn_of(layer, groups.experts);
  const int H = ffn.hidden();
  of_ranks_.resize(size_t(ranks.size()));
  divide_groups(store_, layer, groups, of_ranks_);
  const std::span<const int32_t> adapters = store_.adapted.of_rows(routing.num_tokens);
  const auto turn = ranks.lock();
  elsewhere_.clear();
  for (int to = 1; to < ranks.size(); ++to) {
    RankGroups& theirs = of_ranks_[size_t(to)];
    if (theirs.groups.size() == 0) continue;
    make_job(theirs, layer, routing, {.x = normed, .ld = H}, adapters);
    ranks.send_job(to, theirs.job, theirs.rows);
    elsewhere_.insert(elsewhere_.end(), theirs.groups.pairs.begin(), theirs.groups.pairs.end());
  }
  const RankGroups& own = of_ranks_.front();
  open_groups(layer, own.groups.experts);
  const auto receive = [&](float* outputs, int64_t stride) {
    float* to = outputs + int64_t(own.groups.pairs.size()) * stride;
    for (int from = 1; from < ranks.size(); ++from) {
      const size_t num_rows = of_ranks_[size_t(from)].groups.pairs.size();
      if (num_rows == 0) continue;
      const auto received = ranks.buffer(int64_t(num_rows) * H);
      ranks.receive(from, received);
      for (size_t r = 0; r < num_rows; ++r, to += stride) std::copy_n(received.data() + r * size_t(H), H, to);
    }
  };
  const FfnRows::Outputs exchange = receive;
  ffn.run(formats_,
          {.groups = panels_,
           .begin = own.groups.begin,
           .pairs = own.groups.pairs,
           .num_tokens = routing.num_tokens,
           .top_k = routing.top_k,
           .weights = routing.weights,
           .adapters = adapters,
           .elsewhere = elsewhere_,
           .exchange = &exchange},
          {.x = normed, .ld = H}, hidden);
}

std::span<const float> ExpertCompute::run_job(std::span<const int32_t> job, const float* rows) {
  const ExpertJob read = read_job(job, store_);
  PackedFfn& ffn = ffn_of(read.layer, read.experts);
  const int H = ffn.hidden();
  open_groups(read.layer, read.experts);
  outputs_.resize(read.pairs.size() * size_t(H));
  const auto take = [&](float* outputs, int64_t stride) {
    for (size_t r = 0; r < read.pairs.size(); ++r)
      std::copy_n(outputs + int64_t(r) * stride, H, outputs_.data() + r * size_t(H));
  };
  const FfnRows::Outputs exchange = take;
  ffn.run(formats_,
          {.groups = panels_,
           .begin = read.begin,
           .pairs = read.pairs,
           .num_tokens = read.num_tokens,
           .top_k = read.top_k,
           .weights = nullptr,
           .adapters = read.adapters,
           .exchange = &exchange},
          {.x = rows, .ld = H}, nullptr);
  return outputs_;
}

}  // namespace twofold
