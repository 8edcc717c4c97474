// The router of an MoE layer: norm, gate logits, a score per expert, top-k.
#pragma once
#include <cstdint>
#include <span>

#include "host/thread_pool.h"
#include "ops/linear.h"
#include "ops/tensor_view.h"
#include "twofold/router_shape.h"

namespace twofold {

// Nothing is owned.
struct RouterWeights {
  const float* norm;                 // [hidden]; null: rows are read as they are
  Weight gate;                       // [experts, hidden]
  const float* bias;                 // [experts], added to scores for choosing only; null: none
  const float* gate_bias = nullptr;  // [experts], of the logits
  const float* gate_norm =
      nullptr;  // [hidden], of the rows that the gate reads; null: those that experts read
  const float* expert_scale = nullptr;  // [experts], of the weights, at last; null: 1
  float softcap = 0;                    // above 0: logits become softcap * tanh(logit / softcap)
};

// Bounded preference for resident experts: where experts are chosen, a resident one of score s counts as s / (1
// - prior), so that it replaces a better one only if s is at least (1 - prior) times the other's score. With a
// choosing bias, prior / (1 - prior) * s is added. If weights come from the chosen experts' logits, the score
// is exp(logit). Groups are chosen without the prior, and weights are made of true scores. (After cache-prior
// routing, arXiv 2412.00099.)
struct CachePrior {
  double prior = 0;                        // 0 to below 1; 0: none
  std::span<const uint8_t> resident = {};  // [experts]
  std::span<const uint8_t> rows = {};      // [T] rows that it applies to
};

class Router {
 public:
  // Throws KernelFailure for a shape that the number of experts does not fit.
  Router(const kernels::KernelTable& table, ThreadPool& pool, const RouterWeights& weights, float eps,
         const kernels::RouterShape& shape);

  // For T rows of hidden: normed [T, hidden], ids and weights [T, top_k] in the order of choosing, which is by
  // descending score and bias (ties: lower id first), and the gate's logits [T, experts] unless null.
  void forward(const float* hidden, float* normed, int32_t* ids, float* weights, float* logits, int T,
               const CachePrior& prior = {});

  int hidden_size() const { return static_cast<int>(weights_.gate.cols); }
  int num_experts() const { return static_cast<int>(weights_.gate.rows); }
  int top_k() const { return shape_.top_k; }

 private:
  void score(float* row) const;
  void keep_groups(float* choice, float* group_scores) const;
  void apply_prior(const CachePrior& prior, const float* scores, float* choice) const;
  void pick(float* scores, float* choice, int32_t* ids, float* weights) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  RouterWeights weights_;
  float eps_;
  kernels::RouterShape shape_;
};

}  // namespace twofold
