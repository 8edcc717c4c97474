// Embeddings of n-grams, added to every residual stream by a gate: sum_s += v_s + silu(conv(norm(v)))_s with v_s = sigmoid(g_s)
// value . e, where e are the layer's rows of the step's `layer_inputs` and g_s = sign(k) sqrt(max(|k|, 1e-6)) of
// k = norm(key_s . e) . norm(hidden_s) / sqrt(hidden size). Reference: transformers models/qwen4_exp, Qwen4ExpTextPLELayer.
#pragma once
#include <vector>

#include "moe/block.h"
#include "ops/packed_matrix.h"
#include "ops/recurrent/tail_convolution.h"

namespace twofold {

// Nothing is owned. Norms have weights of their own for each stream.
struct NgramInputParts {
  const PackedMatrix* key;    // [num_streams * hidden size, width]
  const PackedMatrix* value;  // [hidden size, width]
  const float* key_norm;      // [num_streams * hidden size]
  const float* query_norm;    // [num_streams * hidden size]
  const float* conv_norm;     // [num_streams * hidden size]
  TailConvolution conv;       // over all streams; its tail is the block's record
  float eps;
  int64_t first;  // where the layer's rows begin in the step's
  RecordPlace place;
};

class NgramInput final : public Block {
 public:
  NgramInput(const kernels::KernelTable& table, ThreadPool& pool, const NgramInputParts& parts)
      : table_(table), pool_(pool), parts_(parts) {}

  void forward(const float* hidden, float* sum, StepState& step) override;
  int hidden_size() const override { return static_cast<int>(parts_.value->rows()); }
  int num_streams() const override { return static_cast<int>(parts_.key->rows() / parts_.value->rows()); }

 private:
  // v of a token, and its norm; `room` has 2 * hidden size floats.
  void gate(const float* streams, const float* key, const float* value, float* v, float* normed,
            float* room) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  NgramInputParts parts_;
  std::vector<float> keys_, values_, gated_, normed_;
};

}  // namespace twofold
