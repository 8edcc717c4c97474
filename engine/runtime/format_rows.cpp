#include "format_rows.h"

#include <algorithm>

namespace twofold {
namespace {

constexpr int64_t kChunkWeights = 16384;

template <class Row>
void for_rows(ThreadTeam& team, int64_t rows, int64_t columns, const Row& row) {
  const int64_t each = std::max<int64_t>(1, kChunkWeights / std::max<int64_t>(1, columns));
  team.parallel_for((rows + each - 1) / each, [&](int64_t chunk, int) {
    for (int64_t r = chunk * each; r < std::min(rows, (chunk + 1) * each); ++r) row(r);
  });
}

}  // namespace

void quantise_rows(ThreadTeam& team, kernels::WeightFormat format, const float* x, const float* importance,
                   int64_t rows, int64_t columns, uint8_t* out) {
  const int64_t row_bytes = kernels::source_row_bytes(format, columns);
  for_rows(team, rows, columns, [&](int64_t r) {
    kernels::quantise_row(format, x + r * columns, importance, columns, out + r * row_bytes);
  });
}

void dequantise_rows(ThreadTeam& team, kernels::WeightFormat format, const uint8_t* from, const float* scales,
                     int64_t rows, int64_t columns, float* out) {
  const int64_t row_bytes = kernels::source_row_bytes(format, columns), grid = (columns + 127) / 128;
  for_rows(team, rows, columns, [&](int64_t r) {
    const float* own = scales == nullptr ? nullptr : scales + r / 128 * grid;
    kernels::dequantise_row(format, from + r * row_bytes, own, columns, out + r * columns);
  });
}

}  // namespace twofold
