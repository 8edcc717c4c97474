// The router of an MoE layer: norm, gate logits, softmax over all experts, top-k by probability.
#pragma once
#include <cstdint>

#include "host/thread_team.h"
#include "ops/dense_linear.h"
#include "ops/tensor_view.h"

namespace twofold {

class Router {
 public:
  // norm [hidden]; gate [experts, hidden]. With `normalise` the k weights are divided by their sum.
  Router(const kernels::KernelTable& table, ThreadTeam& team, const float* norm, const Weight& gate,
         float eps, int top_k, bool normalise)
      : table_(table),
        team_(team),
        norm_(norm),
        gate_(gate),
        eps_(eps),
        top_k_(top_k),
        normalise_(normalise) {}

  // For T rows of hidden: normed [T, hidden], ids and weights [T, top_k] by descending weight (equal ones:
  // lower id first), and the gate's logits [T, experts] unless null.
  void forward(const float* hidden, float* normed, int32_t* ids, float* weights, float* logits, int T);

  int hidden_size() const { return static_cast<int>(gate_.cols); }
  int num_experts() const { return static_cast<int>(gate_.rows); }
  int top_k() const { return top_k_; }

 private:
  void pick(float* probabilities, int32_t* ids, float* weights) const;

  const kernels::KernelTable& table_;
  ThreadTeam& team_;
  const float* norm_;
  Weight gate_;
  float eps_;
  int top_k_;
  bool normalise_;
};

}  // namespace twofold
