// A decoder layer is a sequence of blocks. Each adds to the residual stream, or to a sum that is normed before
// it is added: attention of some kind, a router, its experts, a feed-forward. The decoder that runs them is
// independent of their kinds.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "moe/expert_compute.h"

namespace twofold {

class AttentionBatch;
class Block;
class MoeExecutor;
class StateCache;

// A router's output for a step's tokens: read by later blocks, written only by routers.
struct RoutedRows {
  std::vector<float> normed;   // [T, hidden size]
  std::vector<int32_t> ids;    // [T, top_k]
  std::vector<float> weights;  // [T, top_k]
  int num_tokens = 0, top_k = 0;

  void resize(int tokens, int hidden_size, int experts_of_token) {
    num_tokens = tokens;
    top_k = experts_of_token;
    normed.resize(static_cast<size_t>(tokens) * static_cast<size_t>(hidden_size));
    ids.resize(static_cast<size_t>(tokens) * static_cast<size_t>(top_k));
    weights.resize(ids.size());
  }
  LayerRouting routing() const { return {ids.data(), weights.data(), num_tokens, top_k}; }
};

// Inputs of all layers, [T, width]; null: no block reads them.
struct LayerInputRows {
  const float* rows = nullptr;
  int64_t width = 0;
};

// State shared by the blocks of one forward pass.
struct StepState {
  AttentionBatch& batch;
  StateCache& cache;
  MoeExecutor* experts;             // null: no block has any
  RoutedRows& routed;               // written by the last router
  std::span<Block* const> ahead;    // the blocks after the current one
  const float* previous = nullptr;  // [T, streams, hidden size], what MtpInput reads; null: no block reads it
  LayerInputRows layer_inputs = {};  // what LayerInput reads
};

class Block {
 public:
  virtual ~Block() = default;
  // sum += the block's output for hidden, both [tokens of the batch, hidden_size()]; they may alias. Throws
  // KernelFailure, std::invalid_argument where batch, cache or experts do not fit the block.
  virtual void forward(const float* hidden, float* sum, StepState& step) = 0;
  virtual int hidden_size() const = 0;
  // Streams, of a hidden state each, that the block itself reads and adds to: `hidden` and `sum` have as many of each token.
  // Other blocks of a model of several streams read and write what a Residual makes of them.
  virtual int num_streams() const { return 1; }
};

}  // namespace twofold
