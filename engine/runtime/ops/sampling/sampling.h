// Picks tokens from rows of logits without sorting the vocabulary.
//
// The rule. An element has the integer weight round(2^b * exp((x - highest) / temperature)); b is the largest
// value for which the sum over the vocabulary fits (45 for 151,936 tokens), so a token 10^13 times less likely
// than the likeliest is never drawn. In the order of descending logits (ties: lower token first): top-k keeps
// the first k; top-p the fewest first ones that hold at least top_p of what top-k kept; min-p those that weigh
// at least min_p of the first. The token is where the running sum of the kept ones first exceeds floor(uniform
// * their sum).
//
// All sums are exact, so the token depends on neither threads, batch nor instruction set. The algorithm: one
// pass for the extremes of blocks of the row. The k-th highest block bounds top-k from below, the highest
// element bounds min-p; unless another rule needs the whole row's sum, only elements above the bound are
// processed further. One pass adds every weight to one of up to 1,024 buckets of falling logits. Running sums
// over the buckets locate each border's bucket; only that bucket's elements are read again, and halved
// (nth_element) rather than sorted.
#pragma once
#include <cstdint>
#include <span>

#include "host/thread_pool.h"
#include "ops/sampling/token_rules.h"
#include "twofold/kernels.h"

namespace twofold {

// How one row is sampled. Temperature 0 takes the highest; top_k 0 or above the vocabulary, top_p 1 and min_p
// 0 keep all. uniform is in [0, 1).
struct Draw {
  double temperature, top_k, top_p, min_p, uniform;
};

// The token of each row of logits [R, vocabulary]. rules: [R], null where a row has none. Rows are changed
// while this runs and are as before when it returns. A NaN is never picked; a row with nothing above minus
// infinity gives 0.
void pick_tokens(const kernels::KernelTable& table, ThreadPool& pool, float* logits, int64_t vocabulary,
                 std::span<const Draw> draws, std::span<const TokenRules* const> rules, int32_t* tokens);

// A row of logits and a bit for each token of the vocabulary, the first token's lowest: whether it is allowed.
struct MaskedRow {
  int64_t row;
  const uint32_t* allowed;  // [ceil(vocabulary / 32)]
};

// Sets the logits [R, vocabulary] of forbidden tokens to minus infinity.
void mask_logits(ThreadPool& pool, float* logits, int64_t vocabulary, std::span<const MaskedRow> rows);

struct LogProbability {
  int32_t token;
  double value;
};

// A logprobs query: row, token, and how many of the row's likeliest tokens to add.
struct LogProbabilityQuery {
  int64_t row;
  int32_t token;
  int32_t num_top;
};

// log softmax in float64. answers[i] has the requested token, then the likeliest ones: descending, ties: the
// lower token first. A row whose highest logit is not finite has -infinity everywhere.
void log_probabilities(const kernels::KernelTable& table, ThreadPool& pool, const float* logits,
                       int64_t vocabulary, std::span<const LogProbabilityQuery> queries,
                       std::span<std::vector<LogProbability>> answers);

}  // namespace twofold
