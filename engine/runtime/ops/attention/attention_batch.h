// One flattened batch of tokens for attention: prefill chunks and decode tokens mixed. Made once per step, used
// by every layer.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/attention/parts/chosen_positions.h"
#include "ops/state_cache.h"
#include "ops/tensor_view.h"

namespace twofold {

// Consecutive tokens of one sequence at consecutive positions, attended to together.
struct AttentionTile {
  int first_token;
  int num_tokens;
};

// Calls body(from, count, rows) for stretches of positions [first, last): `count` consecutive rows of a plane,
// for positions that begin at first + `from`. Pages that are adjacent in memory in the sequence's order are one
// stretch.
template <typename Body>
void for_page_runs(const StatePlane& plane, const int32_t* pages, int page_size, int first, int last,
                   Body body) {
  for (int j = first; j < last;) {
    int count = page_size - j % page_size;
    while (j + count < last &&
           pages[(j + count) / page_size] == pages[j / page_size] + (j % page_size + count) / page_size)
      count += page_size;
    count = std::min(count, last - j);
    body(j - first, count, plane.page(pages[j / page_size]) + j % page_size * plane.row_bytes);
    j += count;
  }
}

class AttentionBatch {
 public:
  // positions, sequence_index [T] i32; page_tables [S, max_pages] i32, entry p holding positions p *
  // page_size onwards; rope_cos, rope_sin [T, rotated pairs] f32; records [S] i32, null where no layer keeps any.
  // Everything is copied. Throws KernelFailure for a negative position or a sequence index outside [0, S).
  AttentionBatch(const TensorView& positions, const TensorView& sequence_index, const TensorView& page_tables,
                 const TensorView& rope_cos, const TensorView& rope_sin, const TensorView* records = nullptr);

  int num_tokens() const { return static_cast<int>(positions_.size()); }
  int position(int token) const { return positions_[static_cast<size_t>(token)]; }
  // Adds a rotation for layers with another rotary embedding: cos, sin [T, its rotated pairs] f32, copied.
  void add_rotation(const TensorView& cos, const TensorView& sin);

  int num_rotations() const { return static_cast<int>(rotations_.size()); }
  int num_rotated_pairs(int rotation = 0) const { return rotations_[static_cast<size_t>(rotation)].pairs; }
  const float* cosine(int token, int rotation = 0) const {
    const Rotation& of = rotations_[static_cast<size_t>(rotation)];
    return of.cosine.data() + static_cast<size_t>(token * of.pairs);
  }
  const float* sine(int token, int rotation = 0) const {
    const Rotation& of = rotations_[static_cast<size_t>(rotation)];
    return of.sine.data() + static_cast<size_t>(token * of.pairs);
  }
  const int32_t* pages(int token) const {
    return page_tables_.data() +
           sequence_index_[static_cast<size_t>(token)] * static_cast<int64_t>(max_pages_);
  }

  // The token's own row in a plane.
  int64_t row(int token, int page_size) const {
    return int64_t{pages(token)[position(token) / page_size]} * page_size + position(token) % page_size;
  }

  // Throws KernelFailure when a token needs a page the tables lack or the cache does not have. Remembers the
  // answer.
  void check_pages(const StateCache& cache);

  // Record number of the token's sequence; valid after check_records has passed.
  int record(int token) const {
    return records_[static_cast<size_t>(sequence_index_[static_cast<size_t>(token)])];
  }

  // Draft verification: numbers [T] i32, the record that receives the layers' state after each token; -1: none.
  // The state after a run's last token is in its sequence's own record in any case.
  void keep_records(const TensorView& numbers);
  int kept_record(int token) const {
    return kept_records_.empty() ? -1 : kept_records_[static_cast<size_t>(token)];
  }
  bool keeps_records() const { return !kept_records_.empty(); }

  // Pictures whose tokens attend to one another: ends [T] i32, the position after the last one that each token attends to in
  // layers that are bidirectional; of a token outside such pictures the one after its own. They never fall along a sequence.
  void see_until(const TensorView& ends);
  int end(int token, bool bidirectional) const {
    return bidirectional && !ends_.empty() ? ends_[static_cast<size_t>(token)] : position(token) + 1;
  }

  // Throws KernelFailure without records, for a record that the cache does not have, and if two runs would
  // continue the same one or a kept record is used twice. Remembers the answer.
  void check_records(const StateCache& cache);

  // The batch cut into tiles of at most `tile_tokens`. Remembers the last cut.
  const std::vector<AttentionTile>& tiles(int tile_tokens);
  // The same without a limit.
  const std::vector<AttentionTile>& runs();

  // Positions that the last chooser of the step chose; later layers may read them too.
  ChosenPositions chosen;

 private:
  struct Rotation {
    std::vector<float> cosine, sine;
    int pairs;
  };

  std::vector<int32_t> positions_, sequence_index_, page_tables_, records_, kept_records_, ends_;
  std::vector<Rotation> rotations_;
  int num_sequences_ = 0, max_pages_ = 0;
  int checked_pages_ = -1, checked_page_size_ = -1;
  int checked_records_ = -1;
  std::vector<AttentionTile> tiles_, runs_;
  int tile_tokens_ = 0;
};

}  // namespace twofold
