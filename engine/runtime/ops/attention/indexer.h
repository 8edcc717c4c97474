// Learned indexer: small heads score the keys of all earlier positions, which lie in a plane of their own. A query keeps the
// positions with the largest weighted sums over all heads (DeepSeek-V3.2, GLM-5); the pools of positions with the largest
// sums, each scored by the mean of its keys, and the newest, incomplete pool (Qwen3.8-Flash-Next); or, head by head, the
// blocks of positions with the largest scores (MiniMax-M3). Scores depend on query and keys alone: not on the batch, nor on
// how a prompt is cut.
#pragma once
#include <algorithm>
#include <span>
#include <vector>

#include "host/thread_pool.h"
#include "ops/attention/parts/norms.h"
#include "ops/attention/parts/projection.h"
#include "ops/attention/parts/query_scale.h"
#include "ops/attention/parts/rotation.h"
#include "ops/attention/parts/selection.h"

namespace twofold {

// Nothing is owned: the creator of the block keeps the arrays.
struct IndexerParts {
  int num_heads, head_dim;
  Projection queries;  // [heads * head_dim, columns] of the block's low-rank queries, or of its input
  bool of_input;       // the latter
  Norm input_norm;     // [columns], a further norm of the normed input that `queries` reads
  Projection keys;     // [head_dim, hidden]: the key; a row per head may follow: its weight, else 1
  Norm query_norm, key_norm;
  Rotation rotation;  // rotates the first elements of a head, or the last ones
  QueryScale scale;
  bool rotates_last = false;
  int block =
      0;  // positions that are chosen together, for each head by itself; 0: positions are chosen one by one
  int local = 0;  // the last so many blocks are always chosen, the query's own included
  int pool = 0;   // positions whose keys' mean is scored in their place, once they are complete; 0: none
  Rotation pool_rotation = {};  // the pool's key is rotated by it, for its last position
  // [pool, head_dim]. Instead of the mean, a pool's key is the sum of its positions' normed keys by the softmax over them of
  // gate + bias, element by element (GLM-5.3-Flash). `keys` then has a gate [head_dim] between key and weights, kept in a
  // separate plane. Null: the mean, whose norm is `key_norm`.
  const float* pool_bias = nullptr;

  int num_planes() const { return pool_bias == nullptr ? 1 : 2; }
};

class Indexer final : public Chooser {
 public:
  Indexer(const kernels::KernelTable& table, ThreadPool& pool, const IndexerParts& parts)
      : table_(table), pool_(pool), parts_(parts), ones_(static_cast<size_t>(parts.num_heads), 1.0f) {}

  int num_planes() const override { return parts_.num_planes(); }
  int num_lists() const override { return parts_.block > 0 ? parts_.num_heads : 1; }
  void choose(const ChooserInput& input, const AttentionBatch& batch, const StateCache& cache, int layer,
              ChosenPositions& chosen) override;

 private:
  // Scores of consecutive tokens of one sequence at positions [first, end).
  struct Task {
    AttentionTile tile;
    int first, end;
  };
  struct Rows;    // keys with weights, and queries, of a batch
  struct Scores;  // scores of some of its tokens

  // The plane of keys, which that of gates follows.
  const StatePlane& plane(const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void project_queries(const ChooserInput& input, int num_tokens, float* queries) const;
  void make_rows(const Rows& rows, const AttentionBatch& batch, const StatePlane& plane, int page_size) const;
  // Replaces the key of each pool's last position by that of the pool.
  void make_pools(const AttentionBatch& batch, const StatePlane& plane, int page_size) const;
  // Adds the gated sum of keys of the pool that ends before `end` to `sum` [head_dim].
  void add_gated(const StatePlane& plane, const int32_t* pages, int end, int page_size,
                 std::vector<float>& sum) const;
  // Positions that are chosen together.
  int unit() const { return std::max({1, parts_.block, parts_.pool}); }
  int num_entries(int position) const {
    return parts_.pool > 0 ? (position + 1) / parts_.pool : position / unit() + 1;
  }
  // Weight of each head in a token's sums.
  const float* weights_of(const Rows& rows, int token) const;
  std::vector<Task> tasks(const AttentionBatch& batch, const Scores& scores) const;
  void add_scores(const Task& task, const Rows& rows, const AttentionBatch& batch, const StatePlane& plane,
                  int page_size, const Scores& scores, float* room) const;
  void add_pool_scores(const Task& task, const Rows& rows, const AttentionBatch& batch,
                       const StatePlane& plane, int page_size, const Scores& scores, float* room) const;
  void keep(const AttentionBatch& batch, int token, float* scores, ChosenPositions& chosen) const;
  template <typename Body>
  void for_all(size_t count, double us, Body body) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  IndexerParts parts_;
  std::vector<float> ones_;
};

}  // namespace twofold
