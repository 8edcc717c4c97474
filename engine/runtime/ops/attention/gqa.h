// Grouped-query attention, composed of its parts in this order: project, norm, rotate, scale, store, select, attend, gate,
// out. hidden += out(gate(attention(norm(hidden)))) over a paged cache of keys and values: a plane per key head, head_dim
// wide, then one per value head, value_dim wide, then those of the selection.
#pragma once
#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/blocked_attention.h"
#include "ops/attention/parts/norms.h"
#include "ops/attention/parts/output_gate.h"
#include "ops/attention/parts/projection.h"
#include "ops/attention/parts/qkv_rows.h"
#include "ops/attention/parts/query_scale.h"
#include "ops/attention/parts/rotation.h"
#include "ops/attention/parts/selection.h"
#include "ops/state_cache.h"

namespace twofold {

struct GqaParts {
  QkvRows rows;        // layout of what `project` gives
  Projection project;  // [rows.size(), hidden]
  HeadNorms norms;
  Rotation rotation;
  QueryScale scale;
  Selection select;
  Scores scores;
  OutputGate gate;
  Projection out;  // [hidden, heads * value_dim]
};

class GqaAttention {
 public:
  GqaAttention(const kernels::KernelTable& table, ThreadPool& pool, GqaParts parts);

  // sum += the attention output of hidden, both [T, hidden_size]; they may alias. Writes the tokens' keys and
  // values into `layer` of the cache first (unless it shares them), so tokens of one sequence in one batch see one
  // another. Throws KernelFailure when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(parts_.out.rows()); }

 private:
  class Source;

  void check(const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void make_heads(float* qkv, const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void make_queries(float* row, const AttentionBatch& batch, int token, float* room) const;
  void store_keys_values(float* row, const AttentionBatch& batch, const StateCache& cache, int layer,
                         int token, float* room) const;
  void attend(const float* qkv, float* out, AttentionBatch& batch, const StateCache& cache, int layer) const;
  void gate(const float* qkv, float* attended, int T) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  GqaParts parts_;
};

}  // namespace twofold
