// Runs a model's blocks in order, in one call: only native code runs between a step's first layer and its last.
#pragma once
#include <span>
#include <vector>

#include "moe/residual.h"

namespace twofold {

class ThreadPool;

class Decoder {
 public:
  // Nothing is owned. threads, one entry per block: how many of the pool's threads it runs on; 0, or no list:
  // all. Throws std::invalid_argument without blocks, for a block of another width or number of streams, for a Residual
  // over blocks that do not exist or that partly belong to another one, for blocks of one stream outside the Residuals of
  // several or that two Residuals make the input of, and for thread counts that the pool cannot be limited to.
  explicit Decoder(std::vector<Block*> blocks, ThreadPool* pool = nullptr, std::vector<int> threads = {});

  // hidden [tokens of the batch, hidden size] becomes the last block's output; the blocks' state for the tokens
  // is in the cache afterwards. Several streams all begin as `hidden`, and end as their mean unless a StreamHead is
  // the last block. Experts run where the executor places them; it may be null if no block has any.
  // previous, layer_inputs: see StepState. Throws as the blocks do.
  void forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts,
               const float* previous = nullptr, const LayerInputRows& layer_inputs = {});

  int hidden_size() const { return blocks_.front()->hidden_size(); }
  int num_streams() const { return num_streams_; }
  // [tokens of the last batch, num_streams, hidden size] before they were joined; none of one stream.
  std::span<const float> streams() const { return streams_; }

 private:
  struct Place {
    int opens = 0;        // sums that begin with this block; it and later blocks add to the last of them
    bool closes = false;  // a Residual, which takes the last
    Residual* reads = nullptr;  // makes what this block and those after it read
    bool in_residual = false;   // which this block reads; else it reads the stream
  };

  void place_residuals();
  void check_streams() const;
  // Whether the block itself reads and adds to several streams.
  bool reads_streams(size_t block) const;
  void run(size_t block, const float* stream, const float* input, float* sum, StepState& step);
  void join_streams(float* hidden, StepState& step);

  std::vector<Block*> blocks_;
  ThreadPool* pool_;
  std::vector<int> threads_;   // empty: no block is limited
  std::vector<Place> places_;  // one per block
  std::vector<std::vector<float>> sums_;
  int num_streams_ = 1;
  StreamHead* head_ = nullptr;          // the last block, where it is one
  std::vector<float> streams_, input_;  // several streams, and what Residuals have blocks read
  bool has_input_ = false;
  RoutedRows routed_;
};

}  // namespace twofold
