// A gated feed-forward that every token goes through: of layers without experts, and shared experts.
#pragma once
#include <vector>

#include "host/thread_pool.h"
#include "ops/linear.h"
#include "ops/packed_ffn.h"
#include "ops/packed_matrix.h"

namespace twofold {

class GatedFfn {
 public:
  // gate and up [intermediate, hidden], down [hidden, intermediate], each of one segment; not owned.
  GatedFfn(const kernels::KernelTable& table, ThreadPool& pool, const PackedMatrix& gate,
           const PackedMatrix& up, const PackedMatrix& down,
           kernels::ExpertActivation activation = kernels::ExpertActivation::kSilu, float limit = 0);

  // sum[t] += weights[t] * down(gated(gate(x_t), up(x_t))); no weights: all 1. input and sum are [T, hidden]
  // and may be the same memory.
  void forward(const InputRows& input, const float* weights, float* sum, int T);

  int hidden_size() const { return ffn_.hidden(); }

 private:
  // The same where a matrix is cut over ranks: product after product.
  void forward_over_ranks(const InputRows& input, const float* weights, float* sum, int T);

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  const PackedMatrix &gate_, &up_, &down_;
  kernels::GatedActivation gated_;
  PackedFfn ffn_;
  FfnPanels panels_;
  FfnFormats formats_;
  std::vector<int> rows_;  // 0, 1, 2, ...
  std::vector<float> inner_, upped_, outputs_;
};

}  // namespace twofold
