// The decode kernels' blocks, played lane by lane on the CPU.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "launch_shapes.h"
#include "packed_matrix.h"
#include "panel_products.h"

using namespace twofold;
using namespace twofold::cuda;
using test::EncodedRows;
using test::PackedMatrix;

namespace {

// What multiply_panel and total leave for one panel: y[token][row], by the lanes of one matrix.
template <WeightFormat F>
std::vector<float> play_panel(const PackedMatrix& matrix, int panel, const EncodedRows& x, int count) {
  constexpr int kTokens = kDecodeTokens;
  float sums[kWarpsOfMatrix][kTokens][32] = {};
  for (int warp = 0; warp < kWarpsOfMatrix; ++warp) {
    float acc[kWarpSize][kTokens][kRowsOfLane] = {};
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const DecodeLane at = decode_lane(warp * kWarpSize + lane);
      for (int unit = at.slot; unit < num_units(F, matrix.columns); unit += kSlots)
        UnitProduct<F, kTokens>::add(matrix.panel(panel), unit, at.quad, matrix.columns, x.bytes.data(),
                                     x.row_bytes, count, acc[lane]);
    }
    for (int t = 0; t < count; ++t) {
      for (int lane = 0; lane < kQuads; ++lane) {
        for (int r = 0; r < kRowsOfLane; ++r) {
          float sum = 0;
          for (int group = 0; group < kLaneGroups; ++group) sum += acc[lane + group * kQuads][t][r];
          sums[warp][t][4 * lane + r] = sum;
        }
      }
    }
  }
  std::vector<float> y(size_t(count) * 32, 0.0f);
  for (int t = 0; t < count; ++t) {
    for (int row = 0; row < 32; ++row) {
      for (int warp = 0; warp < kWarpsOfMatrix; ++warp) y[size_t(t * 32 + row)] += sums[warp][t][row];
    }
  }
  return y;
}

template <WeightFormat F>
void check_product(int rows, int columns, int tokens) {
  const PackedMatrix matrix(F, rows, columns, uint32_t(rows * 7 + columns));
  const EncodedRows x(activation_of(F), tokens, columns, uint32_t(columns));
  for (int panel = 0; panel < kernels::num_panels(rows); ++panel) {
    const std::vector<float> y = play_panel<F>(matrix, panel, x, tokens);
    for (int t = 0; t < tokens; ++t) {
      for (int row = 0; row < 32; ++row) {
        double sum = 0, magnitude = 0;
        for (int c = 0; c < columns && 32 * panel + row < rows; ++c) {
          const double product =
              double(matrix.weight(32 * panel + row, c)) * x.values[size_t(t * columns + c)];
          sum += product;
          magnitude += std::abs(product);
        }
        CHECK(test::close(y[size_t(t * 32 + row)], sum, magnitude));
      }
    }
  }
}

template <WeightFormat F>
void check_format() {
  const int block = kernels::layout_of(F).block_columns;
  for (const int wanted : {32, 100, 256, 288, 768}) {
    const int columns = (wanted + block - 1) / block * block;
    for (const int tokens : {1, 3, 8}) check_product<F>(tokens == 1 ? 70 : 33, columns, tokens);
  }
}

// Every unit of a row has one slot, every row of a panel one quad, in each of a block's matrices.
void check_cover(WeightFormat format, int columns, int threads) {
  const int units = num_units(format, columns);
  const int matrices = threads / (kWarpsOfMatrix * kWarpSize);
  std::vector<int> times(size_t(matrices * units * 32), 0);
  for (int thread = 0; thread < threads; ++thread) {
    const DecodeLane at = decode_lane(thread);
    CHECK(at.matrix >= 0 && at.matrix < matrices);
    for (int unit = at.slot; unit < units; unit += kSlots) {
      for (int r = 0; r < kRowsOfLane; ++r)
        ++times[size_t((at.matrix * units + unit) * 32 + 4 * at.quad + r)];
    }
  }
  CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
  // Units cover the columns, and only whole blocks more than them.
  const int block = kernels::layout_of(format).panel_columns;
  CHECK(units * unit_columns(format) >= columns);
  if (kernels::layout_of(format).panel_block_bytes > kSliceBytes)
    CHECK_EQUAL(units * unit_columns(format), (columns + block - 1) / block * block);
}

}  // namespace

CASE(each_weight_is_multiplied_by_one_lane) {
  for (int f = 0; f < kernels::kNumWeightFormats; ++f) {
    const int block = kernels::kFormatLayouts[f].block_columns;
    for (int columns = block; columns <= 2048; columns += std::max(block, 37 / block * block)) {
      check_cover(WeightFormat(f), columns, kGateUpThreads);
      check_cover(WeightFormat(f), columns, kDownThreads);
    }
  }
}

#define TWOFOLD_FORMAT(name) \
  CASE(products_##name) { check_format<WeightFormat::k##name>(); }
TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT

CASE(a_panel_is_read_within_its_bytes) {
  // The last panel's last byte is the last of the memory: any read behind it is seen by the address
  // sanitizer's stand-in, a guard of NaN patterns that would spoil the sums.
  PackedMatrix matrix(WeightFormat::kBF16, 32, 34, 3);
  const EncodedRows x(ActivationKind::kBF16, 1, 34, 4);
  const std::vector<float> before = play_panel<WeightFormat::kBF16>(matrix, 0, x, 1);
  uint8_t* end = matrix.data() + kernels::panel_bytes(WeightFormat::kBF16, 34);
  std::fill(end, end + 64, uint8_t{0xff});
  CHECK(play_panel<WeightFormat::kBF16>(matrix, 0, x, 1) == before);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
