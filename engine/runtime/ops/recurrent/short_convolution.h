// A short convolution, LFM2's replacement for attention: hidden += out(c * conv(b * x)) with b, c and x, each
// as wide as hidden, taken from in(norm(hidden)). The convolution is causal and has its own taps for each
// element.
//
// Each sequence has a record: the last inputs of the convolution, that of position p in slot p % (taps - 1). A
// sequence's first position treats them as empty, whatever the record holds.
#pragma once
#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/parts/projection.h"
#include "ops/state_cache.h"

namespace twofold {

// Nothing is owned: the creator of the block keeps the arrays. Null pointers mean absent.
struct ShortConvolutionParts {
  Projection project;      // [3 hidden, hidden]: b, c, x
  const float* conv;       // [taps, hidden], the oldest first
  const float* conv_bias;  // [hidden]
  Projection out;          // [hidden, hidden]
};

class ShortConvolution {
 public:
  ShortConvolution(const kernels::KernelTable& table, ThreadPool& pool, const ShortConvolutionParts& parts,
                   int taps)
      : table_(table), pool_(pool), parts_(parts), taps_(taps) {}

  // sum += the block's output for hidden, both [T, hidden_size]; they may alias. Updates the records of the
  // batch's sequences in `layer` of the cache. Throws KernelFailure when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, const StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(parts_.out.rows()); }
  int64_t record_bytes() const { return record_bytes(hidden_size(), taps_); }
  static int64_t record_bytes(int hidden, int taps) { return int64_t{4} * (taps - 1) * hidden; }

 private:
  void check(AttentionBatch& batch, const StateCache& cache, int layer) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  ShortConvolutionParts parts_;
  int taps_;
};

}  // namespace twofold
