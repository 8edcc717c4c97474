// A short convolution, LFM2's replacement for attention: hidden += out(c * conv(b * x)) with b, c and x, each
// as wide as hidden, taken from in(norm(hidden)). The convolution is causal and has its own taps for each
// element.
#pragma once
#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/parts/projection.h"
#include "ops/recurrent/tail_convolution.h"

namespace twofold {

// Nothing is owned: the creator of the block keeps the arrays. Null pointers mean absent.
struct ShortConvolutionParts {
  Projection project;      // [3 hidden, hidden]: b, c, x
  TailConvolution conv;    // of b * x; its tail is the block's record
  const float* conv_bias;  // [hidden]
  Projection out;          // [hidden, hidden]
};

class ShortConvolution {
 public:
  // record_at: byte of a layer's record where the block's begins.
  ShortConvolution(const kernels::KernelTable& table, ThreadPool& pool, const ShortConvolutionParts& parts,
                   int64_t record_at = 0)
      : table_(table), pool_(pool), parts_(parts), record_at_(record_at) {}

  // sum += the block's output for hidden, both [T, hidden_size]; they may alias. Updates the records of the
  // batch's sequences in `layer` of the cache. Throws KernelFailure when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, const StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(parts_.out.rows()); }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  ShortConvolutionParts parts_;
  int64_t record_at_;
};

}  // namespace twofold
