#include "moe/ranks/rank_experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {
namespace {

constexpr size_t kHeader = 5;  // kind, layer, tokens, top_k, groups
// A group costs the time of reading its expert, and about as much again for every 16 tokens.
constexpr int kTokensOfRead = 16;

}  // namespace

void divide_groups(const ExpertStore& store, int layer, const ExpertGroups& groups,
                   std::span<RankGroups> of_ranks) {
  std::vector<int> work(of_ranks.size(), 0);
  std::vector<size_t> chosen(size_t(groups.size()));
  for (const bool is_shared : {false, true}) {  // experts without a choice come first
    for (int g = 0; g < groups.size(); ++g) {
      const uint64_t holders = store.holders(layer, groups.experts[size_t(g)]);
      if (((holders & (holders - 1)) != 0) != is_shared) continue;
      size_t best = of_ranks.size();
      for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
        if ((holders >> rank & 1) != 0 && (best == of_ranks.size() || work[rank] < work[best])) best = rank;
      }
      chosen[size_t(g)] = best;
      work[best] += kTokensOfRead + groups.load(g);
    }
  }
  for (RankGroups& of_rank : of_ranks) {
    of_rank.groups.experts.clear();
    of_rank.groups.begin.assign(1, 0);
    of_rank.groups.pairs.clear();
  }
  for (int g = 0; g < groups.size(); ++g) {
    ExpertGroups& to = of_ranks[chosen[size_t(g)]].groups;
    to.experts.push_back(groups.experts[size_t(g)]);
    to.pairs.insert(to.pairs.end(), groups.pairs.begin() + groups.begin[size_t(g)],
                    groups.pairs.begin() + groups.begin[size_t(g) + 1]);
    to.begin.push_back(int(to.pairs.size()));
  }
}

void make_job(RankGroups& theirs, int layer, const LayerRouting& routing, const InputRows& input,
              std::span<const int32_t> adapters) {
  const ExpertGroups& groups = theirs.groups;
  std::vector<int> sent(size_t(routing.num_tokens), -1);  // token -> its number among those sent
  for (const int pair : groups.pairs) sent[size_t(pair / routing.top_k)] = 0;
  int num_tokens = 0;
  theirs.rows.clear();
  for (int t = 0; t < routing.num_tokens; ++t) {
    if (sent[size_t(t)] < 0) continue;
    sent[size_t(t)] = num_tokens++;
    const float* row = input.x + int64_t{t} * input.ld;
    theirs.rows.insert(theirs.rows.end(), row, row + input.ld);
  }
  theirs.job = {static_cast<int32_t>(RankJob::kExperts), layer, num_tokens, routing.top_k, groups.size()};
  theirs.job.insert(theirs.job.end(), groups.experts.begin(), groups.experts.end());
  theirs.job.insert(theirs.job.end(), groups.begin.begin(), groups.begin.end());
  for (const int pair : groups.pairs)
    theirs.job.push_back(sent[size_t(pair / routing.top_k)] * routing.top_k + pair % routing.top_k);
  for (size_t t = 0; t < adapters.size(); ++t) {
    if (sent[t] >= 0) theirs.job.push_back(adapters[t]);
  }
}

ExpertJob read_job(std::span<const int32_t> job, const ExpertStore& store) {
  const auto expect = [](bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("a job of rank 0 is damaged: ") + what);
  };
  expect(job.size() > kHeader, "it has no header");
  ExpertJob read{job[1], job[2], job[3], {}, {}, {}, {}};
  const size_t num_groups = size_t(std::max(job[4], 0));
  expect(read.layer >= 0 && read.layer < store.num_layers(), "there is no such layer");
  expect(read.num_tokens > 0 && read.top_k > 0, "it has no tokens");
  expect(num_groups > 0 && job.size() > kHeader + 2 * num_groups, "its groups are cut off");
  read.experts = job.subspan(kHeader, num_groups);
  read.begin = job.subspan(kHeader + num_groups, num_groups + 1);
  const std::span<const int32_t> rest = job.subspan(kHeader + 2 * num_groups + 1);
  expect(read.begin.front() == 0 && std::is_sorted(read.begin.begin(), read.begin.end()) &&
             std::cmp_less_equal(read.begin.back(), rest.size()),
         "its pairs are cut off");
  read.pairs = rest.first(size_t(read.begin.back()));
  read.adapters = rest.subspan(read.pairs.size());
  expect(read.adapters.empty() || std::cmp_equal(read.num_tokens, read.adapters.size()),
         "its adapters are cut off");
  for (const int expert : read.experts) {
    expect(expert >= 0 && expert < store.num_experts() && store.expert(read.layer, expert) != nullptr,
           "it names an expert that this rank does not hold");
  }
  for (const int pair : read.pairs)
    expect(pair >= 0 && pair / read.top_k < read.num_tokens, "it names a token that was not sent");
  return read;
}

}  // namespace twofold
