// What blocks read of the residual stream, and how their outputs get into it, where it is not simply read and added to: a norm
// before or after them, or several streams with learned weights (hyper-connections, arXiv 2409.19606).
#pragma once
#include <memory>
#include <utility>
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

// How a token's streams are read, and how they take an output. Kinds: `WeightedStreams`, `GatedStreams`.
class StreamMix {
 public:
  StreamMix(int num_streams, int hidden_size) : num_streams_(num_streams), hidden_size_(hidden_size) {}
  virtual ~StreamMix() = default;

  int num_streams() const { return num_streams_; }
  int hidden_size() const { return hidden_size_; }
  // input [T, hidden size] of streams [T, num_streams, hidden size]. outputs [T, num_streams], if the kind has such
  // weights: each stream's weight of the output; null at a model's end.
  virtual void read(const float* streams, int num_tokens, float* input, float* outputs) = 0;
  // After a read with outputs, [T, num_streams, num_streams]: before a stream takes the output it becomes the sum of all streams
  // by its column. Null: streams are not mixed.
  virtual const float* matrix() const { return nullptr; }

 private:
  int num_streams_, hidden_size_;
};

// Weights are sigmoid(scale * (mix . x) / rms(x) + base), x being a token's streams in a row. Nothing is owned.
struct StreamWeights {
  const PackedMatrix*
      mix;  // [num_streams, or twice as many with outputs, num_streams * hidden size], then those of rounds
  const float* base;        // [rows of mix]
  const float* scale;       // one for each num_streams rows of mix, and one for those of rounds
  float eps;                // epsilon of the root mean square
  float offset;             // added to the weights
  float magnitude = 1;      // factor of the outputs' weights, before the offset
  float output_offset = 0;  // offset of the outputs' weights
  // Rounds of Sinkhorn's iteration that make the softmax of num_streams^2 further rows a matrix whose rows and columns have sums
  // of about 1, by which the streams are mixed (DeepSeek-V4). 0: there are no such rows.
  int rounds = 0;
};

// Reads the weighted sum of the streams.
class WeightedStreams final : public StreamMix {
 public:
  WeightedStreams(const kernels::KernelTable& table, ThreadPool& pool, const StreamWeights& weights,
                  int num_streams)
      : StreamMix(num_streams, static_cast<int>(weights.mix->columns()) / num_streams),
        table_(table),
        pool_(pool),
        weights_(weights) {}

  void read(const float* streams, int num_tokens, float* input, float* outputs) override;
  const float* matrix() const override { return weights_.rounds > 0 ? matrix_.data() : nullptr; }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  StreamWeights weights_;
  std::vector<float> shares_, matrix_;
};

// Nothing is owned.
struct StreamGates {
  const float* norm;  // [num_streams * hidden size], an RMSNorm of each stream
  float eps;
  const PackedMatrix* down;    // [rank, num_streams * hidden size]
  const PackedMatrix* up;      // [num_streams * hidden size, rank]
  const PackedMatrix* inject;  // [num_streams, num_streams * hidden size]; null at a model's end
};

// Reads the mean of the normed streams n, each element times a gate sigmoid(up . silu(down . n / num_streams)). The
// weights of the outputs are 2 sigmoid(inject . n / num_streams) (Qwen3.8-Flash-Next).
class GatedStreams final : public StreamMix {
 public:
  GatedStreams(const kernels::KernelTable& table, ThreadPool& pool, const StreamGates& gates, int num_streams)
      : StreamMix(num_streams, static_cast<int>(gates.up->rows()) / num_streams),
        table_(table),
        pool_(pool),
        gates_(gates) {}

  void read(const float* streams, int num_tokens, float* input, float* outputs) override;

 private:
  void read_some(const float* streams, int first, int num_tokens, float* input, float* outputs);

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  StreamGates gates_;
  std::vector<float> normed_, low_, open_;
};

// Hyper-connection: blocks read the streams as `mix` says, and each stream gets their output times a weight of its own.
class HyperConnection final : public Residual {
 public:
  HyperConnection(ThreadPool& pool, std::shared_ptr<StreamMix> mix, int over)
      : Residual(mix->hidden_size(), over), pool_(pool), mix_(std::move(mix)) {}

  int num_streams() const override { return mix_->num_streams(); }
  void read(const float* streams, float* input, int num_tokens) override;
  void forward(const float* hidden, float* sum, StepState& step) override;

 private:
  ThreadPool& pool_;
  std::shared_ptr<StreamMix> mix_;
  std::vector<float> outputs_;  // read computes them for forward
};

// Ends a model of several streams: sum = what `mix` reads of the streams `hidden`.
class StreamHead final : public Block {
 public:
  explicit StreamHead(std::shared_ptr<StreamMix> mix) : mix_(std::move(mix)) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return mix_->hidden_size(); }
  int num_streams() const override { return mix_->num_streams(); }

 private:
  std::shared_ptr<StreamMix> mix_;
};

}  // namespace twofold
