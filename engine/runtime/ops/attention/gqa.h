// Grouped-query attention: hidden += o_proj(attention(norm(hidden))), with optional norms of queries and keys,
// per head (Qwen3) or over all heads together (OLMoE), rotary embedding, a paged cache of keys and values, and
// optionally a sliding window or chunks, sinks (a logit per head that takes part in the softmax), and an output
// gate (Qwen3-Next). Its cache has a plane per key head, then one per value head, each head_dim wide. Values
// may also be normed, or taken from the keys' projection (Gemma 4).
#pragma once
#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/blocked_attention.h"
#include "ops/linear.h"
#include "ops/packed_matrix.h"
#include "ops/state_cache.h"
#include "ops/tensor_view.h"

namespace twofold {

// Null pointers mean absent. Nothing is owned: the creator of the block keeps the arrays.
struct GqaWeights {
  const float* norm;  // [hidden]
  // [(heads + 2 kv heads) * head_dim, hidden]: all queries, all keys, all values; if gated, every head's gate
  // follows its query; without values where keys are values
  const PackedMatrix* qkv;
  const float* qkv_bias;  // [rows of qkv]
  const float* q_norm;    // [head_dim], or [heads * head_dim] with flat_norms
  const float* k_norm;    // [head_dim], or [kv heads * head_dim]
  const float* v_norm;    // [head_dim]
  const PackedMatrix* o;  // [hidden, heads * head_dim]
  const float* o_bias;    // [hidden]
  const float* sinks;     // [heads]
};

struct GqaShape {
  int num_heads, num_kv_heads, head_dim;
  float eps, scale;
  AttentionWindow window;
  bool flat_norms = false;
  bool rotated = true;      // false: queries and keys carry no positions
  bool neighbours = false;  // rotation pairs elements 2i and 2i + 1 instead of i and i + pairs
  // Scales queries by 1 + slope * log1p(floor((position + 1) / period)); period 0: not at all.
  float period = 0, slope = 0;
  bool gated = false;            // a head's attention output is multiplied by sigmoid(gate)
  bool keys_are_values = false;  // values are the projected keys, before norm and rotation
  int rotation = 0;              // index of the batch's rotation
  float head_eps = 0;            // epsilon of the norms of queries, keys and values

  int query_rows() const { return gated ? 2 * head_dim : head_dim; }  // rows of one head, with its gate
};

class GqaAttention {
 public:
  GqaAttention(const kernels::KernelTable& table, ThreadPool& pool, const GqaWeights& weights,
               const GqaShape& shape);

  // sum += the attention output of hidden, both [T, hidden_size]; they may alias. Writes the tokens' keys and
  // values into `layer` of the cache first, so tokens of one sequence in one batch see one another. Throws
  // KernelFailure when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(weights_.o->rows()); }

 private:
  class Source;

  void check(const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void rotate(float* head, const AttentionBatch& batch, int token, float* room) const;
  void store_keys_values(float* qkv, const AttentionBatch& batch, const StateCache& cache, int layer);
  void gate(const float* qkv, float* attended, int T) const;
  void attend(const float* qkv, float* out, AttentionBatch& batch, const StateCache& cache, int layer) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  GqaWeights weights_;
  GqaShape shape_;
};

}  // namespace twofold
