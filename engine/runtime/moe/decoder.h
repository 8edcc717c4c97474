// The blocks of a model, one after the other, in one call: nothing but native code runs between a step's
// first layer and its last.
#pragma once
#include <vector>

#include "moe/block.h"

namespace twofold {

class ThreadPool;

class Decoder {
 public:
  // Nothing is owned. threads, one of each block: how many of the pool's it runs on; 0, and none given: all. Throws
  // std::invalid_argument without blocks, for one of another width, for a PostNorm over blocks that are not there or
  // that another one takes in part, and for threads that the pool cannot be limited to.
  explicit Decoder(std::vector<Block*> blocks, ThreadPool* pool = nullptr, std::vector<int> threads = {});

  // hidden [tokens of the batch, hidden size] becomes what the last block leaves; what the blocks keep of the
  // tokens is in the cache afterwards. Experts run where the executor says; it
  // may be null where no block has any. Throws as the blocks do.
  void forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts);

  int hidden_size() const { return blocks_.front()->hidden_size(); }

 private:
  struct Place {
    int opens = 0;        // sums that begin with this block: it, and those behind it, add to the last of them
    bool closes = false;  // a PostNorm, which takes the last
  };

  std::vector<Block*> blocks_;
  ThreadPool* pool_;
  std::vector<int> threads_;   // empty: no block is limited
  std::vector<Place> places_;  // of each block
  std::vector<std::vector<float>> sums_;
  RoutedRows routed_;
};

}  // namespace twofold
