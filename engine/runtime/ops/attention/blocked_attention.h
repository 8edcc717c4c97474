// Attention over a paged cache, in blocks of positions: softmax(q k) v of each block separately, with its own
// largest score; the blocks of a row are combined in ascending order (online softmax). Blocks begin at
// multiples of kBlockPositions, so a row's sums and their order depend on its position alone: not on the batch,
// on how a prompt is cut, or on which thread has which block. The scores of a whole context are never stored at
// once, and one context can be shared among threads.
//
// A token whose positions were chosen one by one attends to its list: blocks are of entries of the list instead of
// positions, so its cost grows with the list. A list of all positions gives the bits of attention without lists.
#pragma once
#include <algorithm>
#include <span>
#include <vector>

#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/parts/scores.h"
#include "ops/attention/parts/selection.h"
#include "ops/state_cache.h"

namespace twofold {

inline constexpr int kBlockPositions = 512;

// The queries: tiles of tokens, each split into `parts` tasks with planes of their own. A task has the rows of
// the tile's tokens, `heads(part)` rows each.
class AttentionSource {
 public:
  virtual ~AttentionSource() = default;
  virtual int parts() const = 0;
  virtual int heads(int part) const = 0;
  virtual const StatePlane& keys(int part) const = 0;
  virtual const StatePlane& values(int part) const = 0;
  virtual int first_head(int part) const = 0;  // number of the part's first head
  // [rows, width of keys]; in `room` if they lie nowhere else like that
  virtual const float* queries(const AttentionTile& tile, int part, float* room) const = 0;
  virtual void take(const AttentionTile& tile, int part,
                    const float* sums) const = 0;  // [rows, width of values]
};

class BlockedAttention {
 public:
  // Takes the pool's scratch slots `slot` and `slot + 1`; the caller holds the lock.
  BlockedAttention(const kernels::KernelTable& table, ThreadPool& pool, const Scores& scores,
                   const Selection& select, int slot)
      : table_(table), pool_(pool), scores_(scores), select_(select), slot_(slot) {}

  void run(const AttentionSource& source, const AttentionBatch& batch, std::span<const AttentionTile> tiles,
           int page_size) const;

 private:
  struct Rows;     // rows of a task, and its buffers
  struct Partial;  // the result of some blocks
  struct Task;

  // Bounds of what a token attends to: of positions, or of entries of its list.
  struct Extent {
    int first, end;
  };
  // The token's list for a part's heads; null: they attend to all positions of its stretch.
  const int32_t* list_of(const AttentionBatch& batch, int token, int part) const;
  Extent extent(const AttentionBatch& batch, int token, int part) const;
  Extent extent(const AttentionBatch& batch, const AttentionTile& tile, int part) const;
  std::vector<AttentionTile> split_by_lists(const AttentionBatch& batch,
                                            std::span<const AttentionTile> tiles) const;
  void add_block(const Rows& rows, int block, const Partial& to) const;
  float bend(float* products, int n, float scale) const;
  void add_scores(const Rows& rows, int start, int first, int end) const;
  void add_values(const Rows& rows, int start, int first, int end, float* sums) const;
  void scale_columns(const Rows& rows, const StatePlane& plane, int start, int first, int end) const;
  template <class Body>
  static void for_runs(const Rows& rows, const StatePlane& plane, int first, int end, Body body);
  static void fetch_rows(const Rows& rows, const StatePlane& plane, int first, int end);
  template <class Body>
  void for_rows(const Rows& rows, const StatePlane& plane, int first, int end, Body body) const;
  void merge(const Rows& rows, const Partial& from, const Partial& into) const;
  void finish(const Rows& rows, const Partial& all, const AttentionSource& source, const AttentionTile& tile,
              int part) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  const Scores& scores_;
  const Selection& select_;
  int slot_;
};

// A row for a plane of the cache: rounded to its type.
void store_row(const kernels::KernelTable& table, const float* row, const StatePlane& plane, int64_t at);

}  // namespace twofold
