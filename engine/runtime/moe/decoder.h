// Runs a model's blocks in order, in one call: only native code runs between a step's first layer and its last.
#pragma once
#include <vector>

#include "moe/block.h"

namespace twofold {

class ThreadPool;

class Decoder {
 public:
  // Nothing is owned. threads, one entry per block: how many of the pool's threads it runs on; 0, or no list:
  // all. Throws std::invalid_argument without blocks, for a block of another width, for a PostNorm over blocks
  // that do not exist or that partly belong to another PostNorm, and for thread counts that the pool cannot be
  // limited to.
  explicit Decoder(std::vector<Block*> blocks, ThreadPool* pool = nullptr, std::vector<int> threads = {});

  // hidden [tokens of the batch, hidden size] becomes the last block's output; the blocks' state for the tokens
  // is in the cache afterwards. Experts run where the executor places them; it may be null if no block has any.
  // previous, layer_inputs: see StepState. Throws as the blocks do.
  void forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts,
               const float* previous = nullptr, const LayerInputRows& layer_inputs = {});

  int hidden_size() const { return blocks_.front()->hidden_size(); }

 private:
  struct Place {
    int opens = 0;        // sums that begin with this block; it and later blocks add to the last of them
    bool closes = false;  // a PostNorm, which takes the last
  };

  std::vector<Block*> blocks_;
  ThreadPool* pool_;
  std::vector<int> threads_;   // empty: no block is limited
  std::vector<Place> places_;  // one per block
  std::vector<std::vector<float>> sums_;
  RoutedRows routed_;
};

}  // namespace twofold
