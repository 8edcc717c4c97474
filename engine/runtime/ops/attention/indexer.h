// Learned indexer: small heads score the keys of all earlier positions, which lie in a plane of their own. A query keeps the
// positions with the largest weighted sums over all heads (DeepSeek-V3.2, GLM-5), or, head by head, the blocks of positions
// with the largest scores (MiniMax-M3). Or keys of adjacent positions are pooled, and a query keeps the pools with the largest
// sums (GLM-5.3-Flash). Scores depend on query and keys alone: not on the batch, nor on how a prompt is cut.
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
  Projection keys;     // [head_dim, hidden]: the key; without blocks, a row per head follows: its weight
  Norm query_norm, key_norm;
  Rotation rotation;  // rotates the first elements of a head, or the last ones
  QueryScale scale;
  bool rotates_last = false;
  int block =
      0;  // positions that are chosen together, for each head by itself; 0: positions are chosen one by one
  int local = 0;  // the last so many blocks are always chosen, the query's own included
  // Positions whose keys become one key when the last of them is there: the sum of keys by the softmax over the positions of
  // gate + pool_bias, element by element. Then `keys` has, between key and weights, a gate [head_dim], kept in a plane of its
  // own; the pooled key takes the place of the last position's. Positions after the last pool are chosen, too. 0: no pools.
  int pooled = 0;
  const float* pool_bias = nullptr;  // [pooled, head_dim]

  int64_t weights_at() const { return int64_t{pooled > 0 ? 2 : 1} * head_dim; }
};

class Indexer final : public Chooser {
 public:
  Indexer(const kernels::KernelTable& table, ThreadPool& pool, const IndexerParts& parts)
      : table_(table), pool_(pool), parts_(parts) {}

  int num_planes() const override { return parts_.pooled > 0 ? 2 : 1; }
  int num_lists() const override { return parts_.block > 0 ? parts_.num_heads : 1; }
  void choose(const ChooserInput& input, const AttentionBatch& batch, const StateCache& cache, int layer,
              ChosenPositions& chosen) override;

 private:
  // Scores of consecutive tokens of one sequence at positions, or of pools, [first, end).
  struct Task {
    AttentionTile tile;
    int first, end;
  };
  struct Rows;    // keys with weights, and queries, of a batch
  struct Scores;  // scores of some of its tokens

  const StatePlane& plane(const AttentionBatch& batch, const StateCache& cache, int layer) const;
  void project_queries(const ChooserInput& input, int num_tokens, float* queries) const;
  void make_rows(const Rows& rows, const AttentionBatch& batch, const StatePlane& plane,
                 const StateCache& cache, int layer) const;
  // What is chosen from at `position`, and how many of them are chosen: positions, blocks or pools.
  int num_entries(int position) const {
    if (parts_.pooled > 0) return (position + 1) / parts_.pooled;
    return parts_.block > 0 ? position / parts_.block + 1 : position + 1;
  }
  int most_entries(const ChosenPositions& chosen) const {
    return chosen.most() / std::max({1, parts_.block, parts_.pooled});
  }
  void pool_keys(const AttentionBatch& batch, const StateCache& cache, int layer) const;
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
};

}  // namespace twofold
