#include "ops/layer_inputs.h"

#include <numbers>

#include "host/work_clock.h"

namespace twofold {

void LayerInputs::forward(const int64_t* tokens, const float* hidden, float* out, int T) {
  if (T == 0) return;
  rows_.read(pool_, tokens, T, 1, out, width());
  const WorkTimer timer(Work::kEmbedding);
  const auto lock = pool_.lock_scratch();
  const int size = shape_.size;
  const int64_t values = int64_t{T} * width();
  projected_.resize(static_cast<size_t>(values));
  linear(table_, pool_, {.x = hidden, .ld = hidden_size()}, T, projection_, nullptr, projected_.data());
  const double elements = static_cast<double>(values);
  for_ranges(pool_, values / size, 1, work_us(16.0 * elements, 8.0 * elements),
             [&](int64_t first, int64_t count) {
               for (int64_t i = first; i < first + count; ++i) {
                 float* row = projected_.data() + i * size;
                 float* input = out + i * size;
                 table_.rmsnorm(row, norm_, shape_.eps, row, size);
                 for (int j = 0; j < size; ++j)
                   input[j] = (row[j] + shape_.table_scale * input[j]) * (1 / std::numbers::sqrt2_v<float>);
               }
             });
}

}  // namespace twofold
