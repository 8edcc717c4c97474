// A causal convolution that continues over steps: each element has its own taps, and the inputs of earlier steps are in the
// sequence's record, that of position p in slot p % kept(). A sequence's first position treats them as empty, whatever the
// record holds.
#pragma once
#include <cstdint>

#include "host/function_ref.h"
#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/state_cache.h"

namespace twofold {

// Where a block's record is: in a layer's records of the cache, after those of the layer's earlier blocks.
struct RecordPlace {
  int layer = 0;
  int64_t at = 0;  // byte of the layer's record

  // Throws KernelFailure, which begins with `what`, unless the cache has such records of `bytes` bytes here and the batch's
  // sequences have one each.
  void check(const char* what, AttentionBatch& batch, const StateCache& cache, int64_t bytes) const;
  float* record(const StateCache& cache, int number) const {
    return reinterpret_cast<float*>(cache.record(layer, number).data() + at);
  }
};

struct TailConvolution {
  const float* taps;  // [num_taps, width], the oldest first; not owned
  int num_taps, width;
  int dilation = 1;  // positions from one tap to the next

  int kept() const { return (num_taps - 1) * dilation; }
  int64_t record_bytes() const { return int64_t{4} * kept() * width; }

  // y[t] [width] is the sum over j of taps[j] * rows of position p - (num_taps - 1 - j) * dilation, p being token t's; rows
  // are `ld` apart. `finish` follows for each token, on any thread. Then the records continue after the batch.
  void forward(ThreadPool& pool, AttentionBatch& batch, const StateCache& cache, const RecordPlace& place,
               const float* rows, int64_t ld, float* y, FunctionRef<void(int token, float* y)> finish) const;
};

}  // namespace twofold
