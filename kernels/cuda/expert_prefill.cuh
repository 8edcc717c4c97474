// Routed experts for many tokens: one launch multiplies all groups (a grouped GEMM) on tensor cores. A block
// takes 128 rows of one expert's matrix and a tile of the tokens routed to it; weights come as panels, so a
// bf16 panel's words are a fragment's registers as they lie, and other formats are dequantised to bf16 on the
// way to shared memory. Sums are f32, added in an order fixed by K.
#pragma once

#include "expert_layer.h"
#include "launch_shapes.h"
#include "machine.cuh"
#include "panel_dequantise.h"

namespace twofold::cuda {

struct PrefillMatrix {
  int64_t offset[2];  // panels within the expert: one matrix, or gate and up
  int64_t bias[2];    // float32 biases; 0: none
  int rows;
  int columns;        // a multiple of 16
  int divisor;        // pair / divisor is the row of x
  const uint16_t* x;  // bf16 [.][columns]
  float* out;         // [pairs][num_matrices][rows]
  int num_matrices;
};

template <int kTileTokens>
struct PrefillTile {
  static constexpr int kWarpColumns = kTileTokens >= 128 ? 2 : 1;  // warps side by side over tokens
  static constexpr int kWarpRows = kPrefillThreads / kWarpSize / kWarpColumns;
  static constexpr int kRows = kRowTile / kWarpRows;
  static constexpr int kTokens = kTileTokens / kWarpColumns;
  static constexpr int kWeightWords = kRowTile * kDepthWords;
  static constexpr int kStageWords = kWeightWords + kTileTokens * kActivationStride;
  static constexpr int kStages = kTileTokens >= 128 ? 2 : 3;
  static constexpr int kSharedBytes = kStages * kStageWords * 4;
};

// Weights of columns [first, first + kDepth) of four panels.
template <WeightFormat F>
__device__ inline void load_weights(const uint8_t* matrix, int first_panel, int num_panels,
                                    int64_t panel_bytes, int columns, int first, uint32_t* shared) {
  if constexpr (F == WeightFormat::kBF16) {
    const int num_slices = (columns + 1) / 2;
#pragma unroll
    for (int i = threadIdx.x; i < kTilePanels * kDepthWords * kQuads; i += kPrefillThreads) {
      const int quad = i % kQuads, step = i / kQuads % kDepthWords, panel = i / (kQuads * kDepthWords);
      const bool there = first_panel + panel < num_panels && first / 2 + step < num_slices;
      const uint8_t* from = matrix + (there ? (first_panel + panel) * panel_bytes +
                                                  int64_t(first / 2 + step) * kSliceBytes + 16 * quad
                                            : 0);
      copy_16(shared + panel * kernels::kPanelRows * kDepthWords + weight_word(step, 4 * quad), from, there);
    }
  } else {
    // Four threads share four rows of a panel: 16 columns each.
    constexpr int kBlockColumns = kernels::layout_of(F).panel_columns;
    const int quad = threadIdx.x % kQuads, panel = threadIdx.x / kQuads % kTilePanels;
    const int part = threadIdx.x / (kQuads * kTilePanels);
    const int column = first + 16 * part;
    const int end = (columns + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
    float values[16][kRowsOfLane] = {};
    if (first_panel + panel < num_panels && column + 16 <= end)
      dequantise_16<F>(matrix + (first_panel + panel) * panel_bytes, column, quad, values);
    uint32_t* out = shared + panel * kernels::kPanelRows * kDepthWords;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      uint4 words;
      words.x = bf16_pair(values[2 * s][0], values[2 * s + 1][0]);
      words.y = bf16_pair(values[2 * s][1], values[2 * s + 1][1]);
      words.z = bf16_pair(values[2 * s][2], values[2 * s + 1][2]);
      words.w = bf16_pair(values[2 * s][3], values[2 * s + 1][3]);
      *reinterpret_cast<uint4*>(out + weight_word(8 * part + s, 4 * quad)) = words;
    }
  }
}

template <int kTileTokens>
__device__ inline void load_activations(const PrefillMatrix& matrix, const int32_t* pairs, int count,
                                        int first, uint32_t* shared) {
  constexpr int kChunks = kDepth / 8;  // of 16 bytes
  for (int i = threadIdx.x; i < kTileTokens * kChunks; i += kPrefillThreads) {
    const int token = i / kChunks, column = first + i % kChunks * 8;
    const bool there = token < count && column < matrix.columns;
    const int64_t row = there ? pairs[token] / matrix.divisor : 0;
    copy_16(shared + token * kActivationStride + i % kChunks * 4,
            matrix.x + row * matrix.columns + (there ? column : 0), there);
  }
}

// tiles[i] = {group, first pair within it}.
template <WeightFormat F, int kTileTokens>
__global__ void __launch_bounds__(kPrefillThreads, 2)
    prefill_kernel(PrefillMatrix matrix, ExpertGroups groups, const int2* tiles) {
  using Tile = PrefillTile<kTileTokens>;
  uint32_t* words = dynamic_shared<uint32_t>();
  const int2 tile = tiles[blockIdx.y];
  const int begin = groups.begin[tile.x] + tile.y;
  const int count = min(kTileTokens, groups.begin[tile.x + 1] - begin);
  const int32_t* pairs = groups.pairs + begin;
  const uint8_t* expert = reinterpret_cast<const uint8_t*>(groups.weights[tile.x]);
  const bool second = blockIdx.z != 0;  // no index: the parameters would be copied to a stack
  const uint8_t* weights = expert + (second ? matrix.offset[1] : matrix.offset[0]);
  const int64_t bias_at = second ? matrix.bias[1] : matrix.bias[0];
  const float* bias = bias_at == 0 ? nullptr : reinterpret_cast<const float*>(expert + bias_at);
  const int first_panel = int(blockIdx.x) * kTilePanels;
  const int num_panels = (matrix.rows + kernels::kPanelRows - 1) / kernels::kPanelRows;
  const int64_t panel_bytes = kernels::panel_bytes(F, matrix.columns);
  const int num_stages = (matrix.columns + kDepth - 1) / kDepth;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_row = warp / Tile::kWarpColumns * Tile::kRows;
  const int warp_token = warp % Tile::kWarpColumns * Tile::kTokens;

  const auto load = [&](int stage) {
    if (stage < num_stages) {
      uint32_t* to = words + stage % Tile::kStages * Tile::kStageWords;
      load_activations<kTileTokens>(matrix, pairs, count, stage * kDepth, to + Tile::kWeightWords);
      load_weights<F>(weights, first_panel, num_panels, panel_bytes, matrix.columns, stage * kDepth, to);
    }
    close_copies();  // an empty one keeps the count
  };
  float sums[Tile::kRows / 16][Tile::kTokens / 8][4] = {};
#pragma unroll
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) load(stage);
  for (int stage = 0; stage < num_stages; ++stage) {
    wait_copies<Tile::kStages - 2>();
    __syncthreads();
    load(stage + Tile::kStages - 1);
    const uint32_t* a_words = words + stage % Tile::kStages * Tile::kStageWords;
    const uint32_t* b_words = a_words + Tile::kWeightWords;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t a[Tile::kRows / 16][4];
#pragma unroll
      for (int m = 0; m < Tile::kRows / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const WordOfA at = word_of_a(lane, i);
          const int row = warp_row + 16 * m + at.row;
          a[m][i] = a_words[row / kernels::kPanelRows * kernels::kPanelRows * kDepthWords +
                            weight_word(8 * k + at.step, row % kernels::kPanelRows)];
        }
      }
#pragma unroll
      for (int n = 0; n < Tile::kTokens / 8; ++n) {
        uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const WordOfB at = word_of_b(lane, i);
          b[i] = b_words[(warp_token + 8 * n + at.token) * kActivationStride + 8 * k + at.step];
        }
#pragma unroll
        for (int m = 0; m < Tile::kRows / 16; ++m) multiply_fragments(a[m], b, sums[m][n]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < Tile::kTokens / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ElementOfC at = element_of_c(lane, i);
      const int token = warp_token + 8 * n + at.token;
      if (token >= count) continue;
      float* out = matrix.out + (int64_t(pairs[token]) * matrix.num_matrices + blockIdx.z) * matrix.rows;
#pragma unroll
      for (int m = 0; m < Tile::kRows / 16; ++m) {
        const int row = first_panel * kernels::kPanelRows + warp_row + 16 * m + at.row;
        if (row < matrix.rows) out[row] = bias == nullptr ? sums[m][n][i] : sums[m][n][i] + bias[row];
      }
    }
  }
}

template <WeightFormat F, int kTileTokens>
int run_prefill(const PrefillMatrix& matrix, const ExpertGroups& groups, const int2* tiles, int num_tiles,
                Stream stream) {
  constexpr int kBytes = PrefillTile<kTileTokens>::kSharedBytes;
  const dim3 grid((matrix.rows + kRowTile - 1) / kRowTile, num_tiles, matrix.num_matrices);
  return launch(prefill_kernel<F, kTileTokens>, grid, kPrefillThreads, kBytes, stream, matrix, groups, tiles);
}

using PrefillRunner = int (*)(const PrefillMatrix&, const ExpertGroups&, const int2*, int, Stream);
struct PrefillRunners {
  PrefillRunner few = nullptr;   // tiles of kFewTokens
  PrefillRunner many = nullptr;  // tiles of kManyTokens
};
// Runners for one share of the formats (Share); empty for other formats and for f32.
PrefillRunners float_prefill_runners(WeightFormat format);
PrefillRunners integer_prefill_runners(WeightFormat format);  // blocks of subblocks: q8_0, mxfp4 …
PrefillRunners k_prefill_runners(WeightFormat format);        // q4_k, q5_k, q6_k;

template <WeightFormat F>
PrefillRunners prefill_runners_of() {
  if constexpr (F == WeightFormat::kF32)
    return {};
  else
    return {&run_prefill<F, kFewTokens>, &run_prefill<F, kManyTokens>};
}

}  // namespace twofold::cuda
