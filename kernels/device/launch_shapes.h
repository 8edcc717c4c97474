// Work distribution: how blocks, warps and lanes share a layer's experts. Index arithmetic only,
// plain C++; tests run it for every thread of a launch on the CPU and find each output exactly once.
#pragma once
#include <cstdint>

#include "twofold/host_device.h"
#include "twofold/packed_kernels.h"
#include "twofold/rounding.h"
#include "twofold/weight_format.h"

namespace twofold::cuda {

using kernels::ActivationKind;
using kernels::WeightFormat;

inline constexpr int kWarpSize = 32;

// What the decode kernels multiply weights of a format with.
TWOFOLD_HD constexpr ActivationKind activation_of(WeightFormat format) {
  return kernels::device_activation(format);
}

// ---- decode: one block computes one panel (32 rows) of one expert for all its tokens -----------------------

inline constexpr int kDecodeTokens = 8;  // tokens that a block multiplies at once; more take turns
inline constexpr int kQuads = 8;         // lanes that read one step
inline constexpr int kLaneGroups = kWarpSize / kQuads;
inline constexpr int kWarpsOfMatrix = 4;
inline constexpr int kSlots = kWarpsOfMatrix * kLaneGroups;  // lanes with the same rows: K is cut among them
inline constexpr int kGateUpThreads = 2 * kWarpsOfMatrix * kWarpSize;
inline constexpr int kDownThreads = kWarpsOfMatrix * kWarpSize;

// What a thread of a decode block multiplies: units slot, slot + kSlots, ... of rows 4 quad ... 4 quad + 3.
struct DecodeLane {
  int matrix;  // 0: gate (or down), 1: up
  int slot;
  int quad;
};

TWOFOLD_HD constexpr DecodeLane decode_lane(int thread) {
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  return {warp / kWarpsOfMatrix, warp % kWarpsOfMatrix * kLaneGroups + lane / kQuads, lane % kQuads};
}

struct DecodeItem {
  int group;
  int panel;
};

TWOFOLD_HD constexpr DecodeItem decode_item(int block, int num_panels) {
  return {block / num_panels, block % num_panels};
}

// Blocks to launch where the number of groups is known to the device only: pairs may all differ in expert.
TWOFOLD_HD constexpr int max_groups(int num_pairs, int num_experts) {
  return num_pairs < num_experts ? num_pairs : num_experts;
}

// Shared memory of a decode block: encoded activations, then one sum per warp, token and row.
TWOFOLD_HD constexpr int64_t decode_sum_bytes(int num_warps, int tokens) {
  return int64_t(num_warps) * tokens * kernels::kPanelRows * 4;
}
// How many tokens fit at once, at most kDecodeTokens; 0: not even one.
TWOFOLD_HD constexpr int decode_tile_tokens(int64_t row_bytes, int num_warps, int64_t shared_bytes) {
  int tokens = kDecodeTokens;
  while (tokens > 0 && tokens * row_bytes + decode_sum_bytes(num_warps, tokens) > shared_bytes) --tokens;
  return tokens;
}

// ---- grouping: pairs (token, rank) by expert, stable, so that sums do not depend on the order of threads ---

// Tokens of expert e among the pairs.
TWOFOLD_HD int count_pairs(const int32_t* ids, int num_pairs, int expert) {
  int count = 0;
  for (int p = 0; p < num_pairs; ++p) count += ids[p] == expert;
  return count;
}

TWOFOLD_HD void write_pairs(const int32_t* ids, int num_pairs, int expert, int32_t* out) {
  for (int p = 0; p < num_pairs; ++p) {
    if (ids[p] == expert) *out++ = p;
  }
}

// ---- attention of one query per sequence: a block takes one split of one sequence's positions for up to ----
// ---- kAttentionHeads query heads that share a KV head ------------------------------------------------------

inline constexpr int kSplitTokens = 256;
inline constexpr int kAttentionChunk = 64;  // positions scored before their values are added
inline constexpr int kAttentionHeads = 8;

TWOFOLD_HD constexpr int num_splits(int length) { return (length + kSplitTokens - 1) / kSplitTokens; }

// The positions [begin, end) that a split of a sequence sees; none where begin >= end.
struct SplitRange {
  int begin;
  int end;
};
// first: the first position that the last token attends to.
TWOFOLD_HD constexpr SplitRange split_range(int split, int length, int first) {
  const int begin = split * kSplitTokens > first ? split * kSplitTokens : first;
  const int end = (split + 1) * kSplitTokens < length ? (split + 1) * kSplitTokens : length;
  return {begin, end};
}

// Query heads of one KV head, eight to a block.
struct HeadRange {
  int kv_head;
  int first;
  int count;
};
TWOFOLD_HD constexpr int head_blocks(int num_heads, int num_kv_heads) {
  return num_kv_heads * ((num_heads / num_kv_heads + kAttentionHeads - 1) / kAttentionHeads);
}
TWOFOLD_HD constexpr HeadRange head_range(int block, int num_heads, int num_kv_heads) {
  const int of_kv = num_heads / num_kv_heads;
  const int per_kv = (of_kv + kAttentionHeads - 1) / kAttentionHeads;
  const int kv_head = block / per_kv, part = block % per_kv;
  const int rest = of_kv - part * kAttentionHeads;
  return {kv_head, kv_head * of_kv + part * kAttentionHeads, rest < kAttentionHeads ? rest : kAttentionHeads};
}

// ---- prefill: one block computes kRowTile rows of one expert for a tile of its tokens ----------------------

inline constexpr int kTilePanels = 4;
inline constexpr int kRowTile = kTilePanels * kernels::kPanelRows;
inline constexpr int kDepth = 64;               // columns brought to shared memory at once
inline constexpr int kDepthWords = kDepth / 2;  // as pairs of bf16, which are also steps of a bf16 panel
inline constexpr int kActivationStride = kDepthWords + 4;  // words of a token in shared memory
inline constexpr int kPrefillThreads = 128;

inline constexpr int kFewTokens = 32;    // tile size where experts have few tokens
inline constexpr int kManyTokens = 128;  // tile size where they have many

// The tile that wastes less: half empty large tiles cost more than reading weights again from cache.
TWOFOLD_HD constexpr int tile_tokens_for(int num_pairs, int num_groups) {
  return num_pairs >= num_groups * (kManyTokens / 2) ? kManyTokens : kFewTokens;
}

// Cuts groups into tiles: out[i] = {group, first pair within it}; out null only counts. Groups share no tile.
TWOFOLD_HD int tile_groups(const int32_t* begin, int num_groups, int tile_tokens, int32_t* out) {
  int count = 0;
  for (int g = 0; g < num_groups; ++g) {
    for (int first = 0; first < begin[g + 1] - begin[g]; first += tile_tokens, ++count) {
      if (out == nullptr) continue;
      out[2 * count] = g;
      out[2 * count + 1] = first;
    }
  }
  return count;
}

// Where the word (two columns) `step` of row `row` of a panel lies in shared memory, in words from the
// panel's start. Rows are turned by step, so that the lanes of a fragment (8 rows x 4 steps) meet 32 banks;
// four neighbouring rows stay together, so that a copy of 16 bytes stays one.
TWOFOLD_HD constexpr int weight_word(int step, int row) {
  return step * kernels::kPanelRows + (row ^ ((step & 3) << 3));
}

// Fragments of mma.m16n8k16 with bf16: what lane `lane` holds. A is 16 rows x 16 columns of weights, four
// words (two columns each); B is 16 columns x 8 tokens, two words; C is 16 rows x 8 tokens, four floats.
struct WordOfA {
  int row;   // 0 ... 15
  int step;  // 0 ... 7
};
TWOFOLD_HD constexpr WordOfA word_of_a(int lane, int i) {
  return {lane / 4 + (i % 2) * 8, lane % 4 + (i / 2) * 4};
}
struct WordOfB {
  int token;  // 0 ... 7
  int step;   // 0 ... 7
};
TWOFOLD_HD constexpr WordOfB word_of_b(int lane, int i) { return {lane / 4, lane % 4 + i * 4}; }
struct ElementOfC {
  int row;
  int token;
};
TWOFOLD_HD constexpr ElementOfC element_of_c(int lane, int i) {
  return {lane / 4 + (i / 2) * 8, 2 * (lane % 4) + i % 2};
}

}  // namespace twofold::cuda
