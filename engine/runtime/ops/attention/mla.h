// The attention half of a decoder layer with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section
// 2.1): keys and values of all heads are products of one latent vector per token, and only that, with one key
// that all heads share and that carries the positions, is cached.
//
// Absorbed form for every row, prefill and decode alike, so that the result does not depend on how a prompt is
// cut: a head's query is multiplied into the latent space (k_b), scores are products with the cached rows, the
// weighted latents are summed, and the sum becomes the head's values (v_b). Keys and values are never expanded.
#pragma once
#include <span>

#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/parts/norms.h"
#include "ops/attention/parts/output_gate.h"
#include "ops/attention/parts/projection.h"
#include "ops/attention/parts/query_scale.h"
#include "ops/attention/parts/rotation.h"
#include "ops/attention/parts/scores.h"
#include "ops/attention/parts/selection.h"
#include "ops/packed_matrix.h"
#include "ops/state_cache.h"

namespace twofold {

struct MlaShape {
  int num_heads;
  int nope, rope;  // dimensions of a head's query: those of its own, and those whose key all heads share
  int latent, value;

  int key() const { return nope + rope; }
  int cached() const { return latent + rope; }
};

// Nothing is owned but the chooser of the selection: the creator of the block keeps the arrays.
struct MlaParts {
  MlaShape shape;
  // [q rows + latent + rope + gate_rows, hidden]: queries or their low-rank part, latent, shared key, gates
  Projection project;
  // [heads * query rows, q rows or twice as many]; without a weight, the q rows are the queries
  Projection q_b;
  Norm latent_norm;  // [latent]
  Norm key_norm;     // [rope], of shared keys before their rotation
  Rotation rotation;
  QueryScale scale;
  const PackedMatrix *k_b, *v_b;  // one part of [latent, nope] and of [value, latent] per head
  Selection select;
  Scores scores;
  OutputGate gate;                // of heads * value elements, or one for each head
  bool interleaved_gate = false;  // a head's gate follows its query, and `project` has no gates
  Projection out;                 // [hidden, heads * value]
  int kv_layer = -1;  // earlier layer whose latents are read; -1: `project` has latents of this layer

  bool has_latents() const { return kv_layer < 0; }
  int head_gates() const { return !gate ? 0 : gate.by_head ? 1 : shape.value; }
  int gate_rows() const { return interleaved_gate ? 0 : shape.num_heads * head_gates(); }
  int query_rows() const { return shape.key() + (interleaved_gate ? head_gates() : 0); }
  int latent_rows() const { return has_latents() ? shape.cached() : 0; }
};

// Its cache has one plane, `cached` wide, unless it reads an earlier layer's, then those of the selection.
class MlaAttention {
 public:
  MlaAttention(const kernels::KernelTable& table, ThreadPool& pool, MlaParts parts);

  // sum += the attention output of hidden, both [T, hidden_size]; they may alias. Stores the tokens' latents in
  // `layer` of the cache first, so tokens of one sequence in one batch see one another. Throws KernelFailure
  // when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, const StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(parts_.out.rows()); }

 private:
  struct Tiling {  // the tokens and heads of one task
    int tokens, heads;
  };
  class Source;

  const StatePlane& plane(const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void store_latents(const float* a, const AttentionBatch& batch, const StatePlane& plane, int page_size);
  Tiling tiling(const AttentionBatch& batch) const;
  // q: what `project`, or q_b, has made of tokens from `first` on, `width` elements apart.
  void make_queries(const float* q, int64_t width, const AttentionBatch& batch, int first, int count,
                    float* queries);
  // Replaces the queries of tiles of tokens, the first of which is `first`, by the weighted latents.
  void attend(float* queries, const AttentionBatch& batch, const StatePlane& plane, int page_size, int first,
              std::span<const AttentionTile> tiles, const Tiling& tiling) const;
  // Multiplies heads' values of `count` tokens by their gates: a token's begin `width` after the last one's, a head's `stride`.
  void gate(const float* gates, int64_t width, int64_t stride, int count, float* values) const;
  int64_t q_rows() const { return parts_.project.rows() - parts_.latent_rows() - parts_.gate_rows(); }

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  MlaParts parts_;
};

// Rows of M tokens and as many heads as `w` has parts: row (m, h) begins at data + m * token + h * head.
template <class T>
struct HeadRows {
  T* data;
  int64_t token, head;
  int64_t first = 0;  // row of the step that m = 0 is, for adapters
};

// y(m, h) = w_h x(m, h), and what the row's adapter adds. Takes scratch slot kLinearScratch; the caller holds the lock.
void linear_by_head(const kernels::KernelTable& table, ThreadPool& pool, const HeadRows<const float>& x,
                    int M, const PackedMatrix& w, const HeadRows<float>& y);

}  // namespace twofold
