// Select: which positions a query attends to. A kind derives from Selection and brings its own state; attention knows none.
#pragma once
#include "ops/attention/attention_batch.h"
#include "ops/state_cache.h"
#include "twofold/attention_parts.h"

namespace twofold {

class Selection {
 public:
  virtual ~Selection() = default;

  // Planes of the layer's pages that follow those of keys and values and belong to this kind.
  virtual int num_planes() const { return 0; }
  // Before a layer's step: hidden [T, hidden size], the block's input. The tokens' keys are stored by then.
  virtual void prepare(const float* hidden, AttentionBatch& batch, const StateCache& cache, int layer) {
    (void)hidden, (void)batch, (void)cache, (void)layer;
  }
  // No position before this one is attended to from `position`. Never falls from one position to the next.
  virtual int first(int position) const = 0;
  // Whether the token attends to any of the positions [begin, end), which lie between first() and its own. Replaces the
  // scores of the others among them by -infinity. A token always attends to its own position.
  virtual bool keep(int token, int begin, int end, float* scores) const {
    (void)token, (void)begin, (void)end, (void)scores;
    return true;
  }
};

// All positions, those of a window, or those of a chunk.
class StretchSelection final : public Selection {
 public:
  explicit StretchSelection(const kernels::Stretch& stretch = {}) : stretch_(stretch) {}
  int first(int position) const override { return stretch_.first(position); }

 private:
  kernels::Stretch stretch_;
};

}  // namespace twofold
