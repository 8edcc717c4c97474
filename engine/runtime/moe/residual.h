// How outputs of blocks get into the residual stream where they are not simply added to it: through a norm, or
// into several streams by learned weights (hyper-connections, arXiv 2409.19606).
#pragma once
#include <vector>

#include "moe/block.h"
#include "ops/packed_matrix.h"
#include "twofold/kernels.h"

namespace twofold {

class ThreadPool;

// Follows the `over` blocks whose outputs it puts into the stream. These add to rows of zeros instead, which are
// its `hidden`; its `sum` is the stream.
class Residual : public Block {
 public:
  Residual(int hidden_size, int over) : hidden_size_(hidden_size), over_(over) {}

  int hidden_size() const override { return hidden_size_; }
  int over() const { return over_; }
  // Input [T, hidden size] of its blocks from several streams [T, num_streams, hidden size]; one stream is read
  // as it is.
  virtual void read(const float* streams, float* input, int num_tokens);

 private:
  int hidden_size_, over_;
};

// sum = (sum + norm(hidden)) * scale.
class PostNorm final : public Residual {
 public:
  // norm [hidden_size] is not owned.
  PostNorm(const kernels::KernelTable& table, ThreadPool& pool, const float* norm, int hidden_size, float eps,
           int over, float scale)
      : Residual(hidden_size, over), table_(table), pool_(pool), norm_(norm), eps_(eps), scale_(scale) {}

  void forward(const float* hidden, float* sum, StepState& step) override;

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  const float* norm_;
  float eps_, scale_;
};

// Learned weights of a token's streams x: sigmoid(scale * (mix . x) / rms(x) + base). Nothing is owned.
struct StreamMix {
  const PackedMatrix* mix;  // [a multiple of num_streams, num_streams * hidden size]
  const float* base;        // [rows of mix]
  const float* scale;       // one for each num_streams rows of mix
  int num_streams;
  float eps;     // epsilon of the root mean square
  float offset;  // added to the weights

  int rows() const { return static_cast<int>(mix->rows()); }
  int hidden_size() const { return static_cast<int>(mix->columns()) / num_streams; }
  // [T, rows()] without the offset, for streams [T, num_streams, hidden size].
  void weigh(const kernels::KernelTable& table, ThreadPool& pool, const float* streams, int num_tokens,
             std::vector<float>& weights) const;
  // out [T, hidden size]: the sums of streams by the first num_streams weights of each token.
  void add_up(ThreadPool& pool, const float* streams, const std::vector<float>& weights, int num_tokens,
              float* out) const;
};

// Hyper-connection: blocks read a weighted sum of the streams, and each stream gets their output times a weight of
// its own.
class HyperConnection final : public Residual {
 public:
  // mix has the weights of the sum, then those of the output, which are multiplied by `magnitude`.
  HyperConnection(const kernels::KernelTable& table, ThreadPool& pool, const StreamMix& mix, float magnitude,
                  int over)
      : Residual(mix.hidden_size(), over), table_(table), pool_(pool), mix_(mix), magnitude_(magnitude) {}

  int num_streams() const override { return mix_.num_streams; }
  void read(const float* streams, float* input, int num_tokens) override;
  void forward(const float* hidden, float* sum, StepState& step) override;

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  StreamMix mix_;
  float magnitude_;
  std::vector<float> weights_;  // read computes them for forward
};

// Ends a model of several streams: sum = the weighted sum of the streams `hidden`.
class StreamHead final : public Block {
 public:
  StreamHead(const kernels::KernelTable& table, ThreadPool& pool, const StreamMix& mix)
      : table_(table), pool_(pool), mix_(mix) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return mix_.hidden_size(); }
  int num_streams() const override { return mix_.num_streams; }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  StreamMix mix_;
  std::vector<float> weights_;
};

}  // namespace twofold
