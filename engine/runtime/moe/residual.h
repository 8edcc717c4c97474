// What blocks read of the residual stream, and how their outputs get into it, where it is not simply read and added to: a norm
// before or after them, or several streams with learned weights (hyper-connections, arXiv 2409.19606).
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
  // Streams, of a hidden state each, that the residual stream consists of.
  virtual int num_streams() const { return 1; }
  // Whether its blocks read what `read` makes; else the stream as it is.
  virtual bool reads() const { return num_streams() > 1; }
  // Input [T, hidden size] of its blocks from the streams [T, num_streams, hidden size].
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

// Its blocks read gated rows of the stream x: n * sigmoid(up . silu(down . n)), n = norm(x).
class GatedNorm final : public Residual {
 public:
  // norm [hidden size], down [rank, hidden size] and up [hidden size, rank] are not owned.
  GatedNorm(const kernels::KernelTable& table, ThreadPool& pool, const float* norm, float eps,
            const PackedMatrix& down, const PackedMatrix& up, int over)
      : Residual(static_cast<int>(up.rows()), over),
        table_(table),
        pool_(pool),
        norm_(norm),
        eps_(eps),
        down_(down),
        up_(up) {}

  bool reads() const override { return true; }
  void read(const float* stream, float* input, int num_tokens) override;
  void forward(const float* hidden, float* sum, StepState& step) override;

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  const float* norm_;
  float eps_;
  const PackedMatrix &down_, &up_;
  std::vector<float> low_, gates_;
};

// Learned weights of a token's streams x: sigmoid(scale * (mix . x) / rms(x) + base). Nothing is owned.
struct StreamMix {
  const PackedMatrix*
      mix;             // [groups * num_streams, num_streams * hidden size], and rows that no sigmoid follows
  const float* base;   // [rows of mix]
  const float* scale;  // one for each group, and one for all further rows
  int num_streams, groups;
  float eps;     // epsilon of the root mean square
  float offset;  // added to the weights

  int rows() const { return static_cast<int>(mix->rows()); }
  int hidden_size() const { return static_cast<int>(mix->columns()) / num_streams; }
  // [T, rows()] without the offset, for streams [T, num_streams, hidden size]; of further rows what a sigmoid would be of.
  void weigh(const kernels::KernelTable& table, ThreadPool& pool, const float* streams, int num_tokens,
             std::vector<float>& weights) const;
  // out [T, hidden size]: the sums of streams by the first num_streams weights of each token.
  void add_up(ThreadPool& pool, const float* streams, const std::vector<float>& weights, int num_tokens,
              float* out) const;
};

// How a hyper-connection writes to its streams.
struct StreamWrite {
  float magnitude, offset;  // the output's weight becomes magnitude * weight + offset
  // Rounds of Sinkhorn's iteration that make streams^2 further rows a matrix whose rows and columns have sums of about 1; the
  // streams are mixed by it. 0: there are no such rows, and streams stay as they are.
  int rounds = 0;
};

// Hyper-connection: blocks read a weighted sum of the streams, and each stream gets their output times a weight of
// its own.
class HyperConnection final : public Residual {
 public:
  // mix has the weights of the sum, then those of the output, then, with rounds, those of streams [from, to].
  HyperConnection(const kernels::KernelTable& table, ThreadPool& pool, const StreamMix& mix,
                  const StreamWrite& write, int over)
      : Residual(mix.hidden_size(), over), table_(table), pool_(pool), mix_(mix), write_(write) {}

  int num_streams() const override { return mix_.num_streams; }
  void read(const float* streams, float* input, int num_tokens) override;
  void forward(const float* hidden, float* sum, StepState& step) override;

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  StreamMix mix_;
  StreamWrite write_;
  std::vector<float> weights_;  // read computes them for forward
};

// Ends a model of several streams: sum = the weighted sum of the streams `hidden`.
class StreamHead final : public Block {
 public:
  StreamHead(const kernels::KernelTable& table, ThreadPool& pool, const StreamMix& mix)
      : table_(table), pool_(pool), mix_(mix) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return mix_.hidden_size(); }
  int num_streams() const { return mix_.num_streams; }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  StreamMix mix_;
  std::vector<float> weights_;
};

}  // namespace twofold
