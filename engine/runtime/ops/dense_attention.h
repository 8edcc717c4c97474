// The attention half of a decoder layer: hidden += o_proj(attention(norm(hidden))), with grouped-query heads,
// optional per-head norms of queries and keys (Qwen3), rotary embedding, a paged KV cache and an optional
// sliding window.
#pragma once
#include "host/thread_team.h"
#include "ops/dense_attention_batch.h"
#include "ops/dense_kv_cache.h"
#include "ops/dense_linear.h"
#include "ops/packed_matrix.h"
#include "ops/tensor_view.h"

namespace twofold {

// Null pointers mean "not there". Nothing is owned: whoever makes the block keeps the arrays.
struct AttentionWeights {
  const float* norm;        // [hidden]
  const PackedMatrix* qkv;  // [(heads + 2 kv heads) * head_dim, hidden]: all queries, all keys, all values
  const float* qkv_bias;    // [rows of qkv]
  const float* q_norm;      // [head_dim]
  const float* k_norm;      // [head_dim]
  const PackedMatrix* o;    // [hidden, heads * head_dim]
  const float* o_bias;      // [hidden]
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  float eps, scale;
  int sliding_window;  // positions attended to, the token's own included; 0: all
};

class AttentionBlock {
 public:
  AttentionBlock(const kernels::KernelTable& table, ThreadTeam& team, const AttentionWeights& weights,
                 const AttentionShape& shape);

  // hidden [T, hidden_size] is read and added to. Writes the tokens' keys and values into `layer` of the
  // cache first, so tokens of one sequence in one batch see one another. Throws KernelFailure when batch or
  // cache do not fit.
  void forward(float* hidden, AttentionBatch& batch, KvCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(weights_.o->rows()); }

 private:
  void check(const AttentionBatch& batch, const KvCache& cache, int layer) const;
  void store_keys_values(float* qkv, const AttentionBatch& batch, const KvCache& cache, int layer);
  void attend(const float* qkv, float* out, AttentionBatch& batch, const KvCache& cache, int layer);
  void attend_tile(const float* qkv, float* out, const AttentionTile& tile, int kv_head,
                   const AttentionBatch& batch, const KvCache& cache, int layer, float* memory) const;
  int64_t tile_memory(int rows, int context) const;

  const kernels::KernelTable& table_;
  ThreadTeam& team_;
  AttentionWeights weights_;
  AttentionShape shape_;
};

}  // namespace twofold
