#include "ops/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "host/work_clock.h"

namespace twofold {
namespace {

using kernels::GroupScore;
using kernels::RouterScore;

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Index of the highest of n, the first among equals. A NaN is never greater than anything; if only NaN is left,
// `otherwise`: any index will do, and the NaN must show in the output.
int highest(const float* values, int n, int otherwise) {
  int best = otherwise;
  float most = kMasked;
  for (int i = 0; i < n; ++i) {
    if (values[i] > most) {
      most = values[i];
      best = i;
    }
  }
  return best;
}

void refuse(const char* what, int given, const std::string& expected) {
  throw KernelFailure("Router: " + std::string(what) + " is " + std::to_string(given) + "; expected " +
                      expected);
}

}  // namespace

Router::Router(const kernels::KernelTable& table, ThreadPool& pool, const RouterWeights& weights, float eps,
               const kernels::RouterShape& shape)
    : table_(table), pool_(pool), weights_(weights), eps_(eps), shape_(shape) {
  const int experts = num_experts(), groups = shape.num_groups;
  if (shape.top_k < 1 || shape.top_k > experts)
    refuse("top_k", shape.top_k, "1 to the number of experts, " + std::to_string(experts));
  if (groups < 1 || experts % groups != 0)
    refuse("num_groups", groups, "a divisor of the number of experts, " + std::to_string(experts));
  if (shape.top_groups < 1 || shape.top_groups > groups)
    refuse("top_groups", shape.top_groups, "1 to num_groups, " + std::to_string(groups));
  if (shape.top_k > shape.top_groups * (experts / groups)) {
    refuse(
        "top_k", shape.top_k,
        "at most the experts of top_groups groups, " + std::to_string(shape.top_groups * (experts / groups)));
  }
}

// Turns one token's logits into scores; where weights come from the chosen logits, they stay logits.
void Router::score(float* row) const {
  const int experts = num_experts();
  switch (shape_.score) {
    case RouterScore::kSoftmax: {
      const float total = table_.softmax_exp(row, experts, 1.0f).total;
      for (int e = 0; e < experts; ++e) row[e] /= total;
      break;
    }
    case RouterScore::kSigmoid:
      for (int e = 0; e < experts; ++e) row[e] = 1.0f / (1.0f + std::exp(-row[e]));
      break;
    case RouterScore::kSqrtSoftplus:
      for (int e = 0; e < experts; ++e)
        row[e] = std::sqrt(std::max(row[e], 0.0f) + std::log1p(std::exp(-std::abs(row[e]))));
      break;
    case RouterScore::kSoftmaxOfChosen:
      break;
  }
}

// Experts outside the best groups can no longer be chosen.
void Router::keep_groups(float* choice, float* group_scores) const {
  const int groups = shape_.num_groups, size = num_experts() / groups;
  for (int g = 0; g < groups; ++g) {
    float first = kMasked, second = kMasked;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, choice[e]));
      first = std::max(first, choice[e]);
    }
    const bool two = shape_.group_score == GroupScore::kTopTwoSum && size > 1;
    group_scores[g] = two ? first + second : first;
  }
  for (int g = 0; g < groups; ++g) {
    int better = 0;
    for (int other = 0; other < groups; ++other) {
      better +=
          group_scores[other] > group_scores[g] || (group_scores[other] == group_scores[g] && other < g);
    }
    if (better >= shape_.top_groups)
      std::fill_n(choice + g * size, size, shape_.zero_others ? 0.0f : kMasked);
  }
}

void Router::apply_prior(const CachePrior& prior, const float* scores, float* choice) const {
  const bool logits = shape_.score == RouterScore::kSoftmaxOfChosen;
  const float bonus = static_cast<float>(-std::log1p(-prior.prior));
  const float share = static_cast<float>(prior.prior / (1 - prior.prior));
  for (int e = 0; e < num_experts(); ++e) {
    if (prior.resident[static_cast<size_t>(e)]) choice[e] += logits ? bonus : share * scores[e];
  }
}

// Selection by k passes: k is small, and a pass over some hundred floats is cheaper than any data structure.
void Router::pick(float* scores, float* choice, int32_t* ids, float* weights) const {
  const int k_all = shape_.top_k;
  float sum = 0;
  for (int k = 0; k < k_all; ++k) {
    const int best = highest(choice, num_experts(), k);
    ids[k] = best;
    weights[k] = scores[best];
    sum += weights[k];
    choice[best] = kMasked;
  }
  if (shape_.score == RouterScore::kSoftmaxOfChosen) {
    sum = table_.softmax_exp(weights, k_all, 1.0f).total;
    for (int k = 0; k < k_all; ++k) weights[k] /= sum;
    sum = 1.0f;
  }
  // A softmax's sum is never so small that the addend, needed for a sigmoid, would change it.
  if (shape_.renormalise) {
    for (int k = 0; k < k_all; ++k) weights[k] /= sum + 1e-20f;
  }
  if (shape_.scale != 1.0f) {
    for (int k = 0; k < k_all; ++k) weights[k] *= shape_.scale;
  }
  for (int k = 0; weights_.expert_scale != nullptr && k < k_all; ++k)
    weights[k] *= weights_.expert_scale[ids[k]];
}

void Router::forward(const float* hidden, float* normed, int32_t* ids, float* weights, float* logits, int T,
                     const CachePrior& prior) {
  if (T == 0) return;
  const WorkTimer timer(Work::kRouter);
  const auto lock = pool_.lock_scratch();
  const Weight& gate = weights_.gate;
  const int64_t experts = num_experts();
  if (weights_.norm != nullptr) {
    norm_rows(table_, pool_, hidden, weights_.norm, eps_, normed, T, hidden_size());
  } else {
    std::copy_n(hidden, int64_t{T} * hidden_size(), normed);
  }
  const int64_t choice_floats = experts + shape_.num_groups;
  const bool separate = weights_.gate_norm != nullptr;  // the gate's rows
  const int64_t own_floats = separate ? int64_t{T} * hidden_size() : 0;
  float* scores = pool_.scratch_floats(0, T * (experts + choice_floats) + own_floats);
  float* choices = scores + T * experts;
  const float* rows = normed;
  if (separate) {
    float* own = choices + T * choice_floats;
    norm_rows(table_, pool_, hidden, weights_.gate_norm, eps_, own, T, hidden_size());
    rows = own;
  }
  const double elements = static_cast<double>(experts) * hidden_size();
  const double us =
      work_us(elements * static_cast<double>(kernels::element_bytes(gate.dtype)), 2.0 * elements * T);
  for_ranges(pool_, experts, 16, us, [&](int64_t first, int64_t count) {
    matmul_rows(table_, rows, gate, first, static_cast<int>(count), scores + first, experts, T);
  });
  for (int t = 0; weights_.gate_bias != nullptr && t < T; ++t)
    table_.axpy(1.0f, weights_.gate_bias, scores + t * experts, static_cast<int>(experts));
  for (int64_t i = 0; weights_.softcap > 0 && i < T * experts; ++i)
    scores[i] = weights_.softcap * std::tanh(scores[i] / weights_.softcap);
  if (logits != nullptr) std::memcpy(logits, scores, static_cast<size_t>(T * experts) * sizeof(float));
  const double operations = static_cast<double>(T) * static_cast<double>(experts) * (20.0 + 16.0 * top_k());
  for_ranges(pool_, T, 1, work_us(0, operations), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      float* row = scores + t * experts;
      float* choice = choices + t * choice_floats;
      score(row);
      for (int64_t e = 0; e < experts; ++e)
        choice[e] = weights_.bias == nullptr ? row[e] : row[e] + weights_.bias[e];
      if (shape_.top_groups < shape_.num_groups) keep_groups(choice, choice + experts);
      if (prior.prior > 0 && prior.rows[static_cast<size_t>(t)]) apply_prior(prior, row, choice);
      pick(row, choice, ids + t * top_k(), weights + t * top_k());
    }
  });
}

}  // namespace twofold
