// Multi-head latent attention on the device (absorbed form): the kernels between the layer's projections. Plain
// C++ launchers.
#pragma once
#include <cstdint>

#include "expert_layer.h"
#include "twofold/attention_parts.h"

namespace twofold::cuda {

// The cache of one layer: bf16 [pages][page_size][latent + rope]. Both are even, latent at most kMlaMaxLatent, rope may be 0.
struct MlaPages {
  void* rows;
  int page_size;
  int latent;
  int rope;
};

// What the projections give for each token.
struct MlaRows {
  const void* compressed;  // bf16, rows `stride` elements apart: latent, then the key that heads share
  int64_t stride;
  const void* queries;  // bf16 [tokens][heads][nope + rope]
  int num_tokens;
  int num_heads;
  int nope;
  const float* norm;  // [latent]
  float epsilon;
  const float* cos;  // [tokens][rope / 2]; null: the shared keys and their queries are not rotated
  const float* sin;
  bool neighbours;              // rotation pairs (2i, 2i + 1); else (i, i + rope / 2)
  const int64_t* slot_mapping;  // [tokens] page * page_size + position within it, -1: a row of padding
};

// Stores each token's normalised latent and rotated key in the cache, and its heads' rotated query parts after
// their absorbed ones in `absorbed`: bf16 [tokens][heads][latent + rope], whose first `latent` are the caller's.
int launch_mla_store(const MlaRows& rows, const MlaPages& pages, void* absorbed, Stream stream);

// Attention of one absorbed query per sequence and head over the latents of its pages.
struct MlaDecode {
  const void* absorbed;        // bf16 [sequences][heads][latent + rope]
  const int32_t* page_tables;  // [sequences][max_pages]
  const int32_t* seq_lens;     // [sequences] positions to attend to, this token's included; 0: nothing
  int num_sequences;
  int num_heads;
  int max_pages;
  int max_length;  // bounds the launch
  kernels::ScoreRule rule;
  kernels::Stretch select;
  const float* sinks = nullptr;        // [heads] logit that takes weight and gives nothing; null: none
  kernels::PositionLists chosen = {};  // a list for each sequence
};

// Bytes that the partial results of the splits need.
int64_t mla_workspace_bytes(int num_sequences, int num_heads, int latent, int max_length);

// out: bf16 [sequences][heads][latent], the weighted mean of the latents. Where positions are chosen, time grows with the
// lists.
int launch_mla_decode(const MlaDecode& decode, const MlaPages& pages, float* workspace, void* out,
                      Stream stream);

}  // namespace twofold::cuda
