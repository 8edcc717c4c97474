// What a layer does around its experts and torch has no fitting primitive for. Plain C++ launchers.
#pragma once
#include <cstdint>

#include "expert_layer.h"
#include "twofold/attention_parts.h"
#include "twofold/host_device.h"
#include "twofold/router_shape.h"

namespace twofold::cuda {

// The top_k experts of each token by descending score, the lower number first among equals.
// logits [tokens][experts]. bias [experts] may be null: it takes part in choosing, not in the weights.
int launch_route(const float* logits, const float* bias, int num_tokens, int num_experts,
                 const kernels::RouterShape& shape, int32_t* ids, float* weights, Stream stream);

// The KV cache of one layer: bf16 [pages][page_size][kv_heads][head_dim], keys and values apart.
struct KvPages {
  void* keys;
  void* values;
  int page_size;
  int num_kv_heads;
  int head_dim;  // 64, 128, 256 or 512
};

// qkv: bf16 [tokens][(heads + 2 kv_heads) * head_dim], as the projection gives it.
struct QkvRows {
  const void* qkv;
  int num_tokens;
  int num_heads;
  const float* q_norm;  // [head_dim], null: none
  const float* k_norm;  // [head_dim], null: none
  float epsilon;
  const float* cos;  // [tokens][rotary / 2]
  const float* sin;
  int rotary;  // dimensions that are rotated, a multiple of 64, 0: none; halves are partners
  const int64_t*
      slot_mapping;  // [tokens] page * page_size + position within it, -1: a row of padding, not stored
  const float* v_norm = nullptr;  // [head_dim], null: none
};

// Normalises and rotates q and k, normalises v, stores k and v, and leaves q as bf16 [tokens][heads][head_dim].
int launch_rope_store(const QkvRows& rows, const KvPages& pages, void* q, Stream stream);

// Attention of one query per sequence over its pages.
struct DecodeAttention {
  const void* q;               // bf16 [sequences][heads][head_dim]
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
int64_t attention_workspace_bytes(int num_sequences, int num_heads, int head_dim, int max_length);

// out: bf16 [sequences][heads][head_dim]. Where positions are chosen, time grows with the lists.
int launch_decode_attention(const DecodeAttention& attention, const KvPages& pages, float* workspace,
                            void* out, Stream stream);

}  // namespace twofold::cuda
