#include "ops/format_rows.h"

#include <algorithm>

namespace twofold {

void quantise_rows(ThreadPool& pool, kernels::WeightFormat format, const float* x, const float* importance,
                   int64_t rows, int64_t columns, uint8_t* out) {
  constexpr int64_t kChunkWeights = 16384;
  const int64_t row_bytes = kernels::source_row_bytes(format, columns);
  const int64_t each = std::max<int64_t>(1, kChunkWeights / std::max<int64_t>(1, columns));
  pool.parallel_for((rows + each - 1) / each, [&](int64_t chunk, int) {
    for (int64_t r = chunk * each; r < std::min(rows, (chunk + 1) * each); ++r) {
      kernels::quantise_row(format, x + r * columns, importance, columns, out + r * row_bytes);
    }
  });
}

}  // namespace twofold
