// The kinds of blocks, each an adapter from an operation to a step's state.
#pragma once
#include <optional>
#include <utility>
#include <vector>

#include "moe/block.h"
#include "moe/residual.h"
#include "ops/gated_ffn.h"
#include "ops/router.h"

namespace twofold {

// Attention of any kind: an operation with forward(hidden, sum, batch, cache, layer) and hidden_size().
template <typename Attention>
class AttentionBlock : public Block {
 public:
  // layer: whose planes of the cache are this block's.
  AttentionBlock(Attention attention, int layer) : attention_(std::move(attention)), layer_(layer) {}

  void forward(const float* hidden, float* sum, StepState& step) override {
    attention_.forward(hidden, sum, step.batch, step.cache, layer_);
  }
  int hidden_size() const override { return attention_.hidden_size(); }

 private:
  Attention attention_;
  int layer_;
};

// Computes normed rows and routing for the blocks after it; adds nothing to the sum.
class RouterBlock final : public Block {
 public:
  // of_pictures: routes the step's rows of pictures (StepRows) to as many experts after those of `router`; none: all
  // rows are routed alike.
  explicit RouterBlock(const Router& router, const std::optional<Router>& of_pictures = std::nullopt)
      : router_(router), of_pictures_(of_pictures) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  // Fills `routed` and, unless null, logits [T, num_experts()], the lowest number for experts that a row cannot have.
  void route(const float* hidden, const StepState& step, RoutedRows& routed, float* logits,
             const CachePrior& prior = {});
  int hidden_size() const override { return router_.hidden_size(); }
  int num_experts() const { return router_.num_experts() * (of_pictures_ ? 2 : 1); }
  Router& router() { return router_; }

 private:
  // Cache prior of the experts after this router, if the executor prefers residents.
  static CachePrior prior_of(const StepState& step);
  // route, for rows [first, end) that are all of pictures, or none is.
  void route_alike(bool pictures, const float* hidden, int first, int end, RoutedRows& routed, float* logits,
                   const CachePrior& prior);

  Router router_;
  std::optional<Router> of_pictures_;
  std::vector<float> own_logits_;
};

// sum += the weighted sum of the chosen experts, wherever the executor runs them. If the executor uses
// predictions, it first receives the next router's logits on the residual as it is.
class RoutedExperts final : public Block {
 public:
  // moe_layer: the executor's number of the layer. weighs_rows: a token's weight multiplies the input of its
  // one expert, instead of its output.
  RoutedExperts(int hidden_size, int moe_layer, bool weighs_rows = false)
      : hidden_size_(hidden_size), moe_layer_(moe_layer), weighs_rows_(weighs_rows) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return hidden_size_; }
  int moe_layer() const { return moe_layer_; }

 private:
  void look_ahead_next(const float* hidden, StepState& step);

  const RoutedRows& weighed(const RoutedRows& routed);

  int hidden_size_, moe_layer_;
  bool weighs_rows_;
  RoutedRows next_, weighed_;
  std::vector<float> logits_;
};

// sum += ffn(normed), the router's normed rows; times sigmoid(gate . normed) where there is a gate.
class SharedExperts final : public Block {
 public:
  // gate [hidden], not owned; null: none.
  SharedExperts(const kernels::KernelTable& table, ThreadPool& pool, GatedFfn ffn, const float* gate)
      : table_(table), pool_(pool), ffn_(std::move(ffn)), gate_(gate) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  void forward(float* sum, const float* normed, int T);
  int hidden_size() const override { return ffn_.hidden_size(); }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  GatedFfn ffn_;
  const float* gate_;
  std::vector<float> weights_;
};

// sum += ffn(norm(hidden)): a feed-forward of its own, normally in layers without experts.
class DenseFfn final : public Block {
 public:
  // norm [hidden] is not owned.
  DenseFfn(GatedFfn ffn, const float* norm, float eps) : ffn_(std::move(ffn)), norm_(norm), eps_(eps) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return ffn_.hidden_size(); }

 private:
  GatedFfn ffn_;
  const float* norm_;
  float eps_;
};

// Begins a layer that predicts the token after the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2). hidden
// holds the next tokens' embeddings, step.previous the normed hidden states of the tokens before them. The result
// replaces the sum: sum = projection . [norm(hidden), norm(previous)].
class MtpInput final : public Block {
 public:
  // Nothing is owned. hidden_norm [num_streams * hidden size] has a norm of each stream.
  struct Parts {
    const float* embedding_norm = nullptr;  // [hidden size]
    const float* hidden_norm = nullptr;
    // [hidden size, 2 hidden size] for embedding and hidden state in a row; or [hidden size, hidden size] for each.
    const PackedMatrix* projection = nullptr;
    const PackedMatrix* of_embedding = nullptr;
    const PackedMatrix* of_hidden = nullptr;
    float eps = 0;
    int num_streams = 1;
  };
  MtpInput(const kernels::KernelTable& table, ThreadPool& pool, const Parts& parts)
      : table_(table), pool_(pool), parts_(parts) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override {
    return static_cast<int>((parts_.projection != nullptr ? parts_.projection : parts_.of_hidden)->rows());
  }
  int num_streams() const override { return parts_.num_streams; }

 private:
  void project_joined(const float* hidden, const float* previous, float* sum, int num_rows);
  void project_apart(const float* hidden, const float* previous, float* sum, int num_tokens);

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  Parts parts_;
  std::vector<float> joined_, of_tokens_;
};

// sum += projection . (gelu(gate . hidden) * the layer's input), see LayerInputs.
class LayerInput final : public Block {
 public:
  // gate [size, hidden] and projection [hidden, size] are not owned. first: begin of the layer's input in the step's
  // rows.
  LayerInput(const kernels::KernelTable& table, ThreadPool& pool, const PackedMatrix& gate,
             const PackedMatrix& projection, int64_t first)
      : table_(table), pool_(pool), gate_(gate), projection_(projection), first_(first) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return static_cast<int>(gate_.columns()); }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  const PackedMatrix& gate_;
  const PackedMatrix& projection_;
  int64_t first_;
  std::vector<float> gated_;
};

}  // namespace twofold
