// The kinds of blocks: what each operation takes from a step.
#pragma once
#include <utility>
#include <vector>

#include "moe/block.h"
#include "ops/gated_ffn.h"
#include "ops/router.h"

namespace twofold {

// Attention of any kind: an operation with forward(hidden, batch, cache, layer) and hidden_size().
template <typename Attention>
class AttentionBlock : public Block {
 public:
  // layer: whose planes of the cache are this block's.
  AttentionBlock(Attention attention, int layer) : attention_(std::move(attention)), layer_(layer) {}

  void forward(float* hidden, StepState& step) override { forward(hidden, step.batch, step.cache); }
  void forward(float* hidden, AttentionBatch& batch, StateCache& cache) {
    attention_.forward(hidden, batch, cache, layer_);
  }
  int hidden_size() const override { return attention_.hidden_size(); }
  const Attention& attention() const { return attention_; }

 private:
  Attention attention_;
  int layer_;
};

// Leaves normed rows and routing to the blocks behind it; adds nothing.
class RouterBlock final : public Block {
 public:
  explicit RouterBlock(const Router& router) : router_(router) {}

  void forward(float* hidden, StepState& step) override;
  int hidden_size() const override { return router_.hidden_size(); }
  Router& router() { return router_; }

 private:
  Router router_;
};

// hidden += the weighted sum of the experts that the router chose, wherever the executor runs them. Where it
// welcomes predictions, it is told first what the next router says to the residual as it is.
class RoutedExperts final : public Block {
 public:
  // moe_layer: the executor's number of the layer. weighs_rows: a token's weight multiplies what its one expert
  // reads, not what it says.
  RoutedExperts(int hidden_size, int moe_layer, bool weighs_rows = false)
      : hidden_size_(hidden_size), moe_layer_(moe_layer), weighs_rows_(weighs_rows) {}

  void forward(float* hidden, StepState& step) override;
  int hidden_size() const override { return hidden_size_; }

 private:
  void predict_next(const float* hidden, StepState& step);

  const RoutedRows& weighed(const RoutedRows& routed);

  int hidden_size_, moe_layer_;
  bool weighs_rows_;
  RoutedRows next_, weighed_;
  std::vector<float> logits_;
};

// hidden += ffn(normed), the router's normed rows; times sigmoid(gate . normed) where there is a gate.
class SharedExperts final : public Block {
 public:
  // gate [hidden], null: none. It is not owned.
  SharedExperts(const kernels::KernelTable& table, ThreadPool& pool, GatedFfn ffn, const float* gate)
      : table_(table), pool_(pool), ffn_(std::move(ffn)), gate_(gate) {}

  void forward(float* hidden, StepState& step) override;
  void forward(float* hidden, const float* normed, int T);
  int hidden_size() const override { return ffn_.hidden_size(); }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  GatedFfn ffn_;
  const float* gate_;
  std::vector<float> weights_;
};

// hidden += ffn(norm(hidden)): the feed-forward of a layer without experts.
class DenseFfn final : public Block {
 public:
  // norm [hidden] is not owned.
  DenseFfn(GatedFfn ffn, const float* norm, float eps) : ffn_(std::move(ffn)), norm_(norm), eps_(eps) {}

  void forward(float* hidden, StepState& step) override;
  void forward(float* hidden, int T);
  int hidden_size() const override { return ffn_.hidden_size(); }

 private:
  GatedFfn ffn_;
  const float* norm_;
  float eps_;
};

}  // namespace twofold
