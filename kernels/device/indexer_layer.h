// A learned indexer on the device: keys of its own, scores of a sequence's positions, and the best ones as a list. Plain C++
// launchers.
#pragma once
#include <cstdint>

#include "expert_layer.h"
#include "twofold/host_device.h"

namespace twofold::cuda {

// Keys of one layer: bf16 [pages][page_size][head_dim], head_dim even.
struct IndexPages {
  void* keys;
  int page_size;
  int head_dim;
};

// What the projections give for each token.
struct IndexRows {
  const void* keys;  // bf16, rows `stride` elements apart
  int64_t stride;
  const void* queries;  // bf16 [tokens][heads][head_dim]
  int num_tokens;
  int num_heads;
  const float* query_norm;  // [head_dim], RMSNorm of queries; null: none
  const float* norm;        // [head_dim], of keys; null: they are stored as they are, not rotated either
  const float* bias;        // [head_dim], of LayerNorm of keys; null: RMSNorm
  float epsilon;
  const float* cos;  // [tokens][rotary / 2]
  const float* sin;
  int rotary;                   // elements of keys and queries that are rotated
  bool rotates_last;            // the last ones; else the first ones
  bool neighbours;              // rotation pairs (2i, 2i + 1); else (i, i + rotary / 2)
  const int64_t* slot_mapping;  // [tokens] page * page_size + position within it, -1: a row of padding
};

// Stores each token's normalised and rotated key; rotated: bf16 [tokens][heads][head_dim], the rotated queries.
int launch_index_store(const IndexRows& rows, const IndexPages& pages, void* rotated, Stream stream);

// Pools of consecutive positions whose keys are stored as they are. A pool's key is the norm of their mean, rotated; it
// replaces the key of the pool's last position.
struct IndexPools {
  int pool;                    // positions of a pool; the first one begins at position 0
  const int32_t* page_tables;  // [sequences][max_pages]
  int max_pages;
  const int32_t* sequences;     // [tokens] the sequence of each; null: token t is of sequence t
  const int64_t* positions;     // [tokens]
  const int64_t* slot_mapping;  // [tokens] as in IndexRows
  int num_tokens;
  const float* norm;  // [head_dim]
  float epsilon;
  const float* cos;  // [tokens][rotary / 2], of the positions at which pools begin
  const float* sin;
  int rotary;  // elements of a key that are rotated, the first ones
};

// Stores the keys of pools whose last position is among the tokens; call after the tokens' own keys are stored.
int launch_index_pool(const IndexPools& pools, const IndexPages& pages, Stream stream);

// One query per sequence and head, and the best positions for it.
struct IndexChoice {
  const void* queries;  // bf16 [sequences][heads][head_dim], rotated
  const void*
      weights;  // bf16 weights of the heads, rows `stride` elements apart; null: blocks are chosen by head, or pools
  int64_t stride;
  const int32_t* page_tables;  // [sequences][max_pages]
  const int32_t* seq_lens;     // [sequences] positions to score, this token's included; 0: nothing
  int num_sequences;
  int num_heads;
  int max_pages;
  int max_length;      // bounds the launch
  int most;            // positions that are kept for a query
  int block;           // positions of a block, or of a pool; 1 with weights
  int local;           // the last so many blocks are always kept
  int32_t* positions;  // [sequences][lists][most], ascending
  int32_t* counts;     // [sequences][lists]
  bool pooled;  // blocks are pools: whole ones are chosen, and positions after the last whole one are kept

  TWOFOLD_HD int num_lists() const { return weights != nullptr || pooled ? 1 : num_heads; }
  TWOFOLD_HD int num_blocks(int length) const {
    return pooled ? length / block : (length + block - 1) / block;
  }
  int64_t num_scores() const { return int64_t(num_sequences) * num_lists() * num_blocks(max_length); }
};

// The positions with the largest weighted sums over heads of max(q . k, 0); the pools with the largest such sums; or for
// each head the blocks with the largest q . k. The lower one comes first among equals; all positions are kept if they are
// at most `most`, which is a multiple of `block`, less one with pools. scores: f32 [num_scores()].
int launch_index_choose(const IndexChoice& choice, const IndexPages& pages, float* scores, Stream stream);

}  // namespace twofold::cuda
