#include "moe/blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "host/work_clock.h"
#include "moe/moe_executor.h"
#include "ops/attention/attention_batch.h"

namespace twofold {
namespace {

// Checks that a block's hidden rows are those that the router read.
void expect_routed(const char* block, const RoutedRows& routed, int num_tokens, int hidden_size) {
  if (routed.num_tokens == num_tokens &&
      routed.normed.size() == static_cast<size_t>(num_tokens) * static_cast<size_t>(hidden_size))
    return;
  throw KernelFailure(std::string(block) + ": no router of this step comes before it");
}

}  // namespace

void RouterBlock::forward(const float* hidden, float*, StepState& step) {
  route(hidden, step, step.routed, nullptr, prior_of(step));
}

void RouterBlock::route(const float* hidden, const StepState& step, RoutedRows& routed, float* logits,
                        const CachePrior& prior) {
  const int T = step.batch.num_tokens();
  routed.resize(T, hidden_size(), router_.top_k());
  if (!of_pictures_) {
    return router_.forward(hidden, routed.normed.data(), routed.ids.data(), routed.weights.data(), logits, T,
                           prior);
  }
  if (logits != nullptr)
    std::fill_n(logits, int64_t{T} * num_experts(), std::numeric_limits<float>::lowest());
  const std::span<const uint8_t> pictures =
      step.experts == nullptr ? std::span<const uint8_t>{} : step.experts->rows().pictures;
  if (pictures.empty()) return route_alike(false, hidden, 0, T, routed, logits, prior);
  for (int first = 0, end = 0; first < T; first = end) {
    const uint8_t kind = pictures[static_cast<size_t>(first)];
    while (end < T && pictures[static_cast<size_t>(end)] == kind) ++end;
    route_alike(kind != 0, hidden, first, end, routed, logits, prior);
  }
}

void RouterBlock::route_alike(bool pictures, const float* hidden, int first, int end, RoutedRows& routed,
                              float* logits, const CachePrior& prior) {
  Router& router = pictures ? *of_pictures_ : router_;
  const int64_t H = hidden_size(), K = router.top_k(), E = router_.num_experts(), at = pictures ? E : 0;
  const int count = end - first;
  if (logits != nullptr) own_logits_.resize(static_cast<size_t>(count * E));
  CachePrior own;  // rows of pictures are never generated
  if (!pictures && prior.prior > 0)
    own = {prior.prior, prior.resident,
           prior.rows.subspan(static_cast<size_t>(first), static_cast<size_t>(count))};
  int32_t* const ids = routed.ids.data() + first * K;
  router.forward(hidden + first * H, routed.normed.data() + first * H, ids, routed.weights.data() + first * K,
                 logits == nullptr ? nullptr : own_logits_.data(), count, own);
  for (int64_t i = 0; i < count * K; ++i) ids[i] += static_cast<int32_t>(at);
  for (int64_t t = 0; logits != nullptr && t < count; ++t)
    std::copy_n(own_logits_.data() + t * E, E, logits + (first + t) * num_experts() + at);
}

CachePrior RouterBlock::prior_of(const StepState& step) {
  if (step.experts == nullptr || step.experts->cache_prior() == 0 || step.experts->rows().generated.empty())
    return {};
  for (const Block* block : step.ahead) {
    const RoutedExperts* experts = dynamic_cast<const RoutedExperts*>(block);
    if (experts == nullptr) continue;
    const auto residents = step.experts->residents(experts->moe_layer());
    if (residents.empty()) break;
    return {step.experts->cache_prior(), residents, step.experts->rows().generated};
  }
  return {};
}

void RoutedExperts::forward(const float* hidden, float* sum, StepState& step) {
  expect_routed("RoutedExperts", step.routed, step.batch.num_tokens(), hidden_size_);
  if (step.experts == nullptr) throw KernelFailure("RoutedExperts: the step has no experts");
  if (step.experts->needs_look_ahead()) look_ahead_next(hidden, step);
  const RoutedRows& routed = weighs_rows_ ? weighed(step.routed) : step.routed;
  step.experts->forward(moe_layer_, routed.routing(), routed.normed.data(), sum);
}

// Rows times their weights, and weights of one.
const RoutedRows& RoutedExperts::weighed(const RoutedRows& routed) {
  if (routed.top_k != 1) {
    throw KernelFailure("RoutedExperts: a token has " + std::to_string(routed.top_k) +
                        " experts; expected one where weights multiply what experts read");
  }
  weighed_.resize(routed.num_tokens, hidden_size_, 1);
  weighed_.ids = routed.ids;
  std::fill(weighed_.weights.begin(), weighed_.weights.end(), 1.0f);
  const size_t H = static_cast<size_t>(hidden_size_);
  for (size_t t = 0; t < routed.ids.size(); ++t) {
    const float weight = routed.weights[t];
    const float* from = routed.normed.data() + t * H;
    std::transform(from, from + H, weighed_.normed.data() + t * H, [&](float x) { return x * weight; });
  }
  return weighed_;
}

void RoutedExperts::look_ahead_next(const float* hidden, StepState& step) {
  const int T = step.batch.num_tokens();
  for (Block* block : step.ahead) {
    RouterBlock* next = dynamic_cast<RouterBlock*>(block);
    if (next == nullptr) continue;
    logits_.resize(static_cast<size_t>(T) * static_cast<size_t>(next->num_experts()));
    next->route(hidden, step, next_, logits_.data());
    return step.experts->predict(moe_layer_ + 1, logits_, T);
  }
}

void SharedExperts::forward(const float*, float* sum, StepState& step) {
  const int T = step.batch.num_tokens();
  expect_routed("SharedExperts", step.routed, T, hidden_size());
  forward(sum, step.routed.normed.data(), T);
}

void SharedExperts::forward(float* sum, const float* normed, int T) {
  const int H = hidden_size();
  if (gate_ != nullptr) {
    weights_.resize(static_cast<size_t>(T));
    const Weight gate{gate_, kernels::DType::kF32, 1, H};
    const double products = static_cast<double>(T) * H;
    for_ranges(pool_, T, 1, work_us(4.0 * products, 2.0 * products), [&](int64_t first, int64_t count) {
      float* weights = weights_.data() + first;
      matmul_rows(table_, normed + first * H, gate, 0, 1, weights, 1, static_cast<int>(count));
      for (int64_t t = 0; t < count; ++t) weights[t] = 1.0f / (1.0f + std::exp(-weights[t]));
    });
  }
  ffn_.forward({.x = normed, .ld = H}, gate_ == nullptr ? nullptr : weights_.data(), sum, T);
}

void DenseFfn::forward(const float* hidden, float* sum, StepState& step) {
  ffn_.forward({.x = hidden, .ld = hidden_size(), .norm = norm_, .eps = eps_}, nullptr, sum,
               step.batch.num_tokens());
}

void MtpInput::forward(const float* hidden, float* sum, StepState& step) {
  if (step.previous == nullptr)
    throw KernelFailure("MtpInput: the step has no hidden states of the tokens before");
  const WorkTimer timer(Work::kDenseFfn);
  const int T = step.batch.num_tokens();
  const auto lock = pool_.lock_scratch();
  if (parts_.projection != nullptr) return project_joined(hidden, step.previous, sum, T * parts_.num_streams);
  project_apart(hidden, step.previous, sum, T);
}

// One product of a row for each stream.
void MtpInput::project_joined(const float* hidden, const float* previous, float* sum, int num_rows) {
  const int H = hidden_size();
  joined_.resize(static_cast<size_t>(num_rows) * 2 * static_cast<size_t>(H));
  const double elements = static_cast<double>(num_rows) * H;
  for_ranges(pool_, num_rows, 1, work_us(16.0 * elements, 8.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t row = first; row < first + count; ++row) {
      float* const to = joined_.data() + 2 * row * H;
      table_.rmsnorm(hidden + row * H, parts_.embedding_norm, parts_.eps, to, H);
      table_.rmsnorm(previous + row * H, parts_.hidden_norm + row % parts_.num_streams * H, parts_.eps,
                     to + H, H);
    }
  });
  linear(table_, pool_, {.x = joined_.data(), .ld = 2 * H}, num_rows, *parts_.projection, nullptr, sum);
}

// The embedding's product is the same for all streams.
void MtpInput::project_apart(const float* hidden, const float* previous, float* sum, int num_tokens) {
  const int H = hidden_size(), S = parts_.num_streams, R = num_tokens * S;
  joined_.resize(static_cast<size_t>(R) * static_cast<size_t>(H));
  of_tokens_.resize(static_cast<size_t>(num_tokens) * static_cast<size_t>(H));
  for (int row = 0; row < R; ++row)
    table_.rmsnorm(previous + int64_t{row} * H, parts_.hidden_norm + int64_t{row % S} * H, parts_.eps,
                   joined_.data() + int64_t{row} * H, H);
  const InputRows embeddings{
      .x = hidden, .ld = int64_t{S} * H, .norm = parts_.embedding_norm, .eps = parts_.eps};
  linear(table_, pool_, embeddings, num_tokens, *parts_.of_embedding, nullptr, of_tokens_.data());
  linear(table_, pool_, {.x = joined_.data(), .ld = H}, R, *parts_.of_hidden, nullptr, sum);
  for (int row = 0; row < R; ++row)
    table_.axpy(1.0f, of_tokens_.data() + int64_t{row / S} * H, sum + int64_t{row} * H, H);
}

void LayerInput::forward(const float* hidden, float* sum, StepState& step) {
  const LayerInputRows& inputs = step.layer_inputs;
  const int T = step.batch.num_tokens(), size = static_cast<int>(gate_.rows());
  if (inputs.rows == nullptr || first_ + size > inputs.width) {
    throw KernelFailure("LayerInput: the step's inputs have " + std::to_string(inputs.width) +
                        " elements a token; expected at least " + std::to_string(first_ + size));
  }
  const WorkTimer timer(Work::kDenseFfn);
  const auto lock = pool_.lock_scratch();
  gated_.resize(static_cast<size_t>(T) * static_cast<size_t>(size));
  linear(table_, pool_, {.x = hidden, .ld = hidden_size()}, T, gate_, nullptr, gated_.data());
  const auto gelu = table_.gated_as(kernels::ExpertActivation::kGeluTanh);
  for (int64_t t = 0; t < T; ++t)
    gelu(gated_.data() + t * size, inputs.rows + t * inputs.width + first_, gated_.data() + t * size, size,
         0);
  linear(table_, pool_, {.x = gated_.data(), .ld = size}, T, projection_, nullptr, sum, true);
}

}  // namespace twofold
