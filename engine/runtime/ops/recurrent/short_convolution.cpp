#include "ops/recurrent/short_convolution.h"

#include "host/work_clock.h"

namespace twofold {
namespace {

// Slots of the pool's scratch, beside linear()'s.
constexpr int kProjectedScratch = 1, kConvolvedScratch = 2;

}  // namespace

void ShortConvolution::forward(const float* hidden, float* sum, AttentionBatch& batch,
                               const StateCache& cache, int layer) {
  const RecordPlace place{layer, record_at_};
  place.check("ShortConvolution.forward", batch, cache, parts_.conv.record_bytes());
  const int T = batch.num_tokens(), H = hidden_size();
  if (T == 0) return;
  const auto lock = pool_.lock_scratch();
  WorkTimer timer(Work::kQkv);
  float* projected = pool_.scratch_floats(kProjectedScratch, int64_t{T} * 3 * H);
  float* convolved = pool_.scratch_floats(kConvolvedScratch, int64_t{T} * H);
  parts_.project.run(table_, pool_, hidden, H, T, projected);

  timer.next(Work::kAttention);
  const auto row = [&](int token) { return projected + int64_t{token} * 3 * H; };
  const double elements = static_cast<double>(T) * H;
  for_ranges(pool_, T, 1, work_us(12.0 * elements, elements), [&](int64_t first, int64_t count) {
    for (int t = static_cast<int>(first); t < first + count; ++t) {
      float *b = row(t), *x = b + 2 * H;
      for (int i = 0; i < H; ++i) b[i] *= x[i];
    }
  });
  parts_.conv.forward(pool_, batch, cache, place, projected, 3 * H, convolved, [&](int t, float* y) {
    const float* const c = row(t) + H;
    for (int i = 0; i < H; ++i)
      y[i] = c[i] * (parts_.conv_bias == nullptr ? y[i] : y[i] + parts_.conv_bias[i]);
  });

  timer.next(Work::kOutput);
  parts_.out.add(table_, pool_, convolved, T, sum);
}

}  // namespace twofold
