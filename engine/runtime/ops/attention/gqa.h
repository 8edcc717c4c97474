// Grouped-query attention: hidden += o_proj(attention(norm(hidden))), with optional norms of queries and keys,
// per head (Qwen3) or over all heads together (OLMoE), rotary embedding, a paged cache of keys and values, and
// optionally a sliding window or chunks, sinks (a logit per head that takes part in the softmax), and an output
// gate (Qwen3-Next). Its cache has a plane per key head, head_dim wide, then one per value head, value_dim wide.
// Values may also be normed, or taken from the keys' projection, or keys and values are those that an earlier layer
// stored (Gemma 4).
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
  const float* norm;  // [hidden]; null: the hidden state is read as it is
  // [heads * head_dim + kv heads * (head_dim + value_dim), hidden]: all queries, all keys, all values; if gated,
  // every head's gate follows its query; without values where keys are values, without keys and values where an
  // earlier layer's are read; gate rows of all heads, if any
  const PackedMatrix* qkv;
  const float* qkv_bias;  // [rows of qkv]
  const float* q_norm;    // [head_dim], or [heads * head_dim] with flat_norms
  const float* k_norm;    // [head_dim], or [kv heads * head_dim]
  const float* v_norm;    // [value_dim]
  const float* q_scale;   // [head_dim], of the queries after rotation
  const PackedMatrix* o;  // [hidden, heads * value_dim]
  const float* o_bias;    // [hidden]
  const float* sinks;     // [heads]
};

struct GqaShape {
  int num_heads, num_kv_heads, head_dim, value_dim;
  float eps, scale;
  AttentionWindow window;
  bool flat_norms = false;
  bool rotated = true;      // false: queries and keys carry no positions
  bool neighbours = false;  // rotation pairs elements 2i and 2i + 1 instead of i and i + pairs
  Temperature temperature = {};
  bool gated = false;     // a head's attention output is multiplied by sigmoid(gate)
  int gate_rows = 0;      // a head's gate rows after all values: 1, value_dim, or 0 if it has none there
  bool softplus = false;  // softplus(gate) instead of the sigmoid
  float value_scale = 1;  // values are multiplied by this
  bool keys_are_values = false;  // values are the projected keys, before norm and rotation
  bool shares_kv = false;        // the cache's layer has keys and values already: none are computed or stored
  int rotation = 0;              // index of the batch's rotation
  float head_eps = 0;            // epsilon of the norms of queries, keys and values

  int query_rows() const { return gated ? 2 * head_dim : head_dim; }  // rows of one head, with its gate
};

class GqaAttention {
 public:
  GqaAttention(const kernels::KernelTable& table, ThreadPool& pool, const GqaWeights& weights,
               const GqaShape& shape);

  // sum += the attention output of hidden, both [T, hidden_size]; they may alias. Writes the tokens' keys and
  // values into `layer` of the cache first (unless it shares them), so tokens of one sequence in one batch see one
  // another. Throws KernelFailure when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(weights_.o->rows()); }

 private:
  class Source;

  void check(const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void rotate(float* head, const AttentionBatch& batch, int token, float* room) const;
  void store_keys_values(float* qkv, const AttentionBatch& batch, const StateCache& cache, int layer);
  void gate(const float* qkv, float* attended, int T) const;
  void gate_head(const float* row, int head, float* attended) const;
  void scale_queries(float* row, int position) const;
  void attend(const float* qkv, float* out, AttentionBatch& batch, const StateCache& cache, int layer) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  GqaWeights weights_;
  GqaShape shape_;
};

}  // namespace twofold
