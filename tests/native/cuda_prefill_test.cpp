// The prefill kernel's block, played warp by warp on the CPU: staging, fragments, matrix instruction, store.
#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "check.h"
#include "launch_shapes.h"
#include "packed_matrix.h"
#include "panel_dequantise.h"

using namespace twofold;
using namespace twofold::cuda;
using test::PackedMatrix;

namespace {

float bf16(float value) { return float_of_bits(uint32_t(bf16_of_float(value)) << 16); }

// mma.m16n8k16, from the lanes' registers as the instruction's manual lays them out.
void play_multiply(const uint32_t (&a)[32][4], const uint32_t (&b)[32][2], float (&c)[32][4]) {
  float weights[16][16], tokens[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, of_group = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = group + (i % 2 ? 8 : 0), column = 2 * of_group + (i / 2 ? 8 : 0);
      weights[row][column] = bf16_low(a[lane][i]);
      weights[row][column + 1] = bf16_high(a[lane][i]);
    }
    for (int i = 0; i < 2; ++i) {
      const int k = 2 * of_group + 8 * i;
      tokens[k][group] = bf16_low(b[lane][i]);
      tokens[k + 1][group] = bf16_high(b[lane][i]);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i / 2 ? 8 : 0), column = 2 * (lane % 4) + i % 2;
      for (int k = 0; k < 16; ++k) c[lane][i] += weights[row][k] * tokens[k][column];
    }
  }
}

template <WeightFormat F>
void stage_weights(const PackedMatrix& matrix, int first_panel, int first, std::vector<uint32_t>& shared) {
  const int block = kernels::layout_of(F).panel_columns;
  const int end = (matrix.columns + block - 1) / block * block;
  for (int panel = 0; panel < kTilePanels; ++panel) {
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int part = 0; part < kDepth / 16; ++part) {
        float values[16][kRowsOfLane] = {};
        const int column = first + 16 * part;
        if (first_panel + panel < kernels::num_panels(matrix.rows) && column + 16 <= end)
          dequantise_16<F>(matrix.panel(first_panel + panel), column, quad, values);
        for (int s = 0; s < 8; ++s) {
          for (int r = 0; r < kRowsOfLane; ++r) {
            const size_t at = size_t(panel * 32 * kDepthWords + weight_word(8 * part + s, 4 * quad) + r);
            shared[at] = bf16_pair(values[2 * s][r], values[2 * s + 1][r]);
          }
        }
      }
    }
  }
}

// y[token][row] of one block of 128 rows and at most 32 tokens.
template <WeightFormat F>
std::vector<float> play_block(const PackedMatrix& matrix, int first_panel, const std::vector<float>& x,
                              int count) {
  std::vector<float> y(size_t(count) * kRowTile, NAN);
  std::array<float[32][4], 4 * 2 * 4> sums = {};  // [warp][m][n]
  for (int stage = 0; stage * kDepth < matrix.columns; ++stage) {
    std::vector<uint32_t> weights(size_t(kTilePanels) * 32 * kDepthWords, 0);
    std::vector<uint32_t> tokens(size_t(kFewTokens) * kActivationStride, 0);
    stage_weights<F>(matrix, first_panel, stage * kDepth, weights);
    for (int t = 0; t < count; ++t) {
      for (int w = 0; w < kDepthWords; ++w) {
        const int column = stage * kDepth + 2 * w;
        if (column < matrix.columns)
          tokens[size_t(t * kActivationStride + w)] =
              bf16_pair(x[size_t(t * matrix.columns + column)], x[size_t(t * matrix.columns + column + 1)]);
      }
    }
    for (int warp = 0; warp < 4; ++warp) {
      for (int k = 0; k < kDepth / 16; ++k) {
        for (int m = 0; m < 2; ++m) {
          for (int n = 0; n < 4; ++n) {
            uint32_t a[32][4], b[32][2];
            for (int lane = 0; lane < 32; ++lane) {
              for (int i = 0; i < 4; ++i) {
                const WordOfA at = word_of_a(lane, i);
                const int row = 32 * warp + 16 * m + at.row;
                a[lane][i] =
                    weights[size_t(row / 32 * 32 * kDepthWords + weight_word(8 * k + at.step, row % 32))];
              }
              for (int i = 0; i < 2; ++i) {
                const WordOfB at = word_of_b(lane, i);
                b[lane][i] = tokens[size_t((8 * n + at.token) * kActivationStride + 8 * k + at.step)];
              }
            }
            play_multiply(a, b, sums[size_t((warp * 2 + m) * 4 + n)]);
          }
        }
      }
    }
  }
  for (int warp = 0; warp < 4; ++warp) {
    for (int m = 0; m < 2; ++m) {
      for (int n = 0; n < 4; ++n) {
        for (int lane = 0; lane < 32; ++lane) {
          for (int i = 0; i < 4; ++i) {
            const ElementOfC at = element_of_c(lane, i);
            const int row = 32 * warp + 16 * m + at.row, token = 8 * n + at.token;
            if (token < count)
              y[size_t(token * kRowTile + row)] = sums[size_t((warp * 2 + m) * 4 + n)][lane][i];
          }
        }
      }
    }
  }
  return y;
}

template <WeightFormat F>
void check_format() {
  const int block = kernels::layout_of(F).block_columns;
  for (const int wanted : {64, 112, 256, 320}) {
    const int columns = (wanted + block - 1) / block * block;
    const int rows = 150, count = 29;
    const PackedMatrix matrix(F, rows, columns, uint32_t(columns + 1));
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> x(size_t(count * columns), 0.0f);
    for (float& value : x) value = bf16(normal(random));
    for (int first_panel = 0; first_panel < kernels::num_panels(rows); first_panel += kTilePanels) {
      const std::vector<float> y = play_block<F>(matrix, first_panel, x, count);
      for (int t = 0; t < count; ++t) {
        for (int row = 0; row < kRowTile; ++row) {
          double sum = 0, magnitude = 0;
          const int of_matrix = 32 * first_panel + row;
          for (int c = 0; c < columns && of_matrix < rows; ++c) {
            const double product = double(bf16(matrix.weight(of_matrix, c))) * x[size_t(t * columns + c)];
            sum += product;
            magnitude += std::abs(product);
          }
          // Twice rounded weights may differ from once rounded ones by a step where they are not exact.
          const double slack = F == WeightFormat::kBF16 || F == WeightFormat::kF16 ? 0 : 1e-3 * magnitude;
          CHECK(std::abs(y[size_t(t * kRowTile + row)] - sum) <= slack + 2e-5 * magnitude + 1e-6);
        }
      }
    }
  }
}

template <WeightFormat F>
void check_dequantise() {
  const int columns = 768;
  const PackedMatrix matrix(F, 40, columns, 11);
  for (int row = 0; row < 40; ++row) {
    for (int first = 0; first < columns; first += 16) {
      float values[16][kRowsOfLane];
      dequantise_16<F>(matrix.panel(row / 32), first, row % 32 / 4, values);
      for (int c = 0; c < 16; ++c) {
        const float expected = matrix.weight(row, first + c);
        CHECK(std::abs(values[c][row % 4] - expected) <= 1e-6f * (1 + std::abs(expected)));
      }
    }
  }
}

}  // namespace

CASE(dequantised_weights_are_those_that_were_packed) {
  kernels::for_each_format([]<class Format>(Format) { check_dequantise<kernels::kNumberOf<Format>>(); });
}

// f32 is not for tensor cores, but its panels go the same way.
#define TWOFOLD_FORMAT(name) \
  CASE(grouped_product_##name) { check_format<WeightFormat::k##name>(); }
TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT

CASE(shared_words_are_distinct_and_fragments_meet_all_banks) {
  std::set<int> words;
  for (int step = 0; step < kDepthWords; ++step) {
    for (int row = 0; row < 32; ++row) words.insert(weight_word(step, row));
    for (int quad = 0; quad < kQuads; ++quad) {
      CHECK_EQUAL(weight_word(step, 4 * quad) % 4, 0);  // a copy of 16 bytes stays aligned and whole
      for (int r = 1; r < 4; ++r)
        CHECK_EQUAL(weight_word(step, 4 * quad + r), weight_word(step, 4 * quad) + r);
    }
  }
  CHECK_EQUAL(int(words.size()), kDepthWords * 32);
  CHECK_EQUAL(*words.rbegin(), kDepthWords * 32 - 1);
  for (int k = 0; k < kDepth / 16; ++k) {
    for (int i = 0; i < 4; ++i) {
      for (int m = 0; m < 2; ++m) {
        std::set<int> banks;
        for (int lane = 0; lane < 32; ++lane) {
          const WordOfA at = word_of_a(lane, i);
          banks.insert(weight_word(8 * k + at.step, 16 * m + at.row) % 32);
        }
        CHECK_EQUAL(int(banks.size()), 32);
      }
    }
    for (int i = 0; i < 2; ++i) {
      std::set<int> banks;
      for (int lane = 0; lane < 32; ++lane) {
        const WordOfB at = word_of_b(lane, i);
        banks.insert((at.token * kActivationStride + 8 * k + at.step) % 32);
      }
      CHECK_EQUAL(int(banks.size()), 32);
    }
  }
}
