// The layers of a model, one after the other, in one call: nothing but native code runs between a step's
// first layer and its last.
#pragma once
#include <cstdint>
#include <vector>

#include "moe/moe_executor.h"
#include "ops/dense_attention.h"
#include "ops/dense_ffn.h"
#include "ops/dense_router.h"

namespace twofold {

// Exactly one of `router` and `dense` is not null. Nothing is owned.
struct DecoderLayer {
  AttentionBlock* attention;
  Router* router;
  DenseFfn* dense;
};

class Decoder {
 public:
  explicit Decoder(std::vector<DecoderLayer> layers);

  // hidden [tokens of the batch, hidden size] becomes what the last layer leaves; keys and values are in the
  // cache afterwards. Experts run where the executor says; where it welcomes predictions, it is told what the
  // next router says to the residual before each layer's experts. Throws KernelFailure, std::invalid_argument
  // as the parts do.
  void forward(float* hidden, AttentionBatch& batch, KvCache& cache, MoeExecutor& experts);

  int hidden_size() const { return layers_.front().attention->hidden_size(); }

 private:
  void mix(size_t layer, int moe_layer, float* hidden, int T, MoeExecutor& experts, bool predicts);

  std::vector<DecoderLayer> layers_;
  std::vector<Router*> routers_;  // of the layers with experts, in order
  // What a router answers, for the layer at hand and for the one ahead.
  struct Routed {
    std::vector<float> normed, weights;
    std::vector<int32_t> ids;
    void fit(const Router& router, int T);
  };
  Routed routed_, ahead_;
  std::vector<float> logits_;
};

}  // namespace twofold
