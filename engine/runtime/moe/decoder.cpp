#include "moe/decoder.h"

#include <stdexcept>
#include <utility>

namespace twofold {

Decoder::Decoder(std::vector<DecoderLayer> layers) : layers_(std::move(layers)) {
  if (layers_.empty()) throw std::invalid_argument("Decoder: no layers were given; expected at least one");
  for (const DecoderLayer& layer : layers_) {
    if (layer.attention == nullptr || (layer.router == nullptr) == (layer.dense == nullptr)) {
      throw std::invalid_argument(
          "Decoder: a layer has attention and either a router or a dense feed-forward");
    }
    if (layer.router != nullptr) routers_.push_back(layer.router);
  }
}

void Decoder::Routed::fit(const Router& router, int T) {
  const size_t rows = static_cast<size_t>(T);
  normed.resize(rows * static_cast<size_t>(router.hidden_size()));
  ids.resize(rows * static_cast<size_t>(router.top_k()));
  weights.resize(ids.size());
}

void Decoder::forward(float* hidden, AttentionBatch& batch, KvCache& cache, MoeExecutor& experts) {
  const int T = batch.num_tokens();
  if (T == 0) return;
  const bool predicts = experts.wants_prediction();
  int moe_layer = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].attention->forward(hidden, batch, cache, static_cast<int>(i));
    if (layers_[i].dense != nullptr) {
      layers_[i].dense->forward(hidden, T);
    } else {
      mix(i, moe_layer++, hidden, T, experts, predicts);
    }
  }
}

void Decoder::mix(size_t layer, int moe_layer, float* hidden, int T, MoeExecutor& experts, bool predicts) {
  Router& router = *layers_[layer].router;
  routed_.fit(router, T);
  router.forward(hidden, routed_.normed.data(), routed_.ids.data(), routed_.weights.data(), nullptr, T);
  if (predicts && static_cast<size_t>(moe_layer) + 1 < routers_.size()) {
    Router& next = *routers_[static_cast<size_t>(moe_layer) + 1];
    ahead_.fit(next, T);
    logits_.resize(static_cast<size_t>(T) * static_cast<size_t>(next.num_experts()));
    next.forward(hidden, ahead_.normed.data(), ahead_.ids.data(), ahead_.weights.data(), logits_.data(), T);
    experts.predict(moe_layer + 1, logits_, T);
  }
  const LayerRouting routing{routed_.ids.data(), routed_.weights.data(), T, router.top_k()};
  experts.forward(moe_layer, routing, routed_.normed.data(), hidden);
}

}  // namespace twofold
