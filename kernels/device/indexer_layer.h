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
  const float* norm;        // [head_dim], of keys
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

// One query per sequence and head, and the best positions for it.
struct IndexChoice {
  const void* queries;  // bf16 [sequences][heads][head_dim], rotated
  const void*
      weights;  // bf16 weights of the heads, rows `stride` elements apart; null: blocks are chosen by head
  int64_t stride;
  const int32_t* page_tables;  // [sequences][max_pages]
  const int32_t* seq_lens;     // [sequences] positions to score, this token's included; 0: nothing
  int num_sequences;
  int num_heads;
  int max_pages;
  int max_length;      // bounds the launch
  int most;            // positions that are kept for a query
  int block;           // positions of a block, which `most` is a multiple of; 1 with weights
  int local;           // the last so many blocks are always kept
  int32_t* positions;  // [sequences][lists][most], ascending
  int32_t* counts;     // [sequences][lists]

  TWOFOLD_HD int num_lists() const { return weights != nullptr ? 1 : num_heads; }
  TWOFOLD_HD int num_blocks(int length) const { return (length + block - 1) / block; }
  int64_t num_scores() const { return int64_t(num_sequences) * num_lists() * num_blocks(max_length); }
};

// The positions with the largest weighted sums over heads of max(q . k, 0); or for each head the blocks with the largest
// q . k. The lower one comes first among equals; all are kept if they are at most `most`. scores: f32 [num_scores()].
int launch_index_choose(const IndexChoice& choice, const IndexPages& pages, float* scores, Stream stream);

}  // namespace twofold::cuda
