#include "ops/recurrent/short_convolution.h"

#include <algorithm>
#include <string>
#include <vector>

#include "host/work_clock.h"

namespace twofold {
namespace {

// Slots of the pool's scratch, beside linear()'s.
constexpr int kProjectedScratch = 1, kConvolvedScratch = 2;

}  // namespace

void ShortConvolution::check(AttentionBatch& batch, const StateCache& cache, int layer) const {
  if (layer < 0 || layer >= cache.num_layers()) {
    throw KernelFailure("ShortConvolution.forward: layer is " + std::to_string(layer) +
                        "; the cache has layers 0 to " + std::to_string(cache.num_layers() - 1));
  }
  if (cache.record_bytes(layer) != record_bytes()) {
    throw KernelFailure("ShortConvolution.forward: a record of the cache has " +
                        std::to_string(cache.record_bytes(layer)) + " bytes in layer " +
                        std::to_string(layer) + "; expected " + std::to_string(record_bytes()));
  }
  batch.check_records(cache);
}

void ShortConvolution::forward(const float* hidden, float* sum, AttentionBatch& batch,
                               const StateCache& cache, int layer) {
  check(batch, cache, layer);
  const int T = batch.num_tokens(), H = hidden_size(), kept = taps_ - 1;
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
  struct Place {
    const AttentionTile* run;
    float* tail;
  };
  std::vector<Place> of_token(static_cast<size_t>(T));
  for (const AttentionTile& run : batch.runs()) {
    float* tail = reinterpret_cast<float*>(cache.record(layer, batch.record(run.first_token)).data());
    std::fill_n(of_token.begin() + run.first_token, run.num_tokens, Place{&run, tail});
  }
  for_ranges(pool_, T, 1, work_us(4.0 * (taps_ + 3) * elements, 2.0 * taps_ * elements),
             [&](int64_t first, int64_t count) {
               for (int t = static_cast<int>(first); t < first + count; ++t) {
                 const auto& [run, tail] = of_token[static_cast<size_t>(t)];
                 const int position = batch.position(t), begin = batch.position(run->first_token);
                 float* y = convolved + int64_t{t} * H;
                 std::fill_n(y, H, 0.0f);
                 for (int j = 0; j < taps_; ++j) {
                   const int back = kept - j;
                   if (position < back) continue;  // no inputs before the sequence
                   const float* from = position - back >= begin
                                           ? row(t - back)
                                           : tail + int64_t{(position - back) % kept} * H;
                   const float* taps = parts_.conv + int64_t{j} * H;
                   for (int i = 0; i < H; ++i) y[i] += taps[i] * from[i];
                 }
                 const float* c = row(t) + H;
                 for (int i = 0; i < H; ++i)
                   y[i] = c[i] * (parts_.conv_bias == nullptr ? y[i] : y[i] + parts_.conv_bias[i]);
               }
             });
  const auto write_tail = [&](int first, int end, float* tail) {
    for (int t = std::max(first, end - kept); t < end; ++t)
      std::copy_n(row(t), H, tail + int64_t{batch.position(t) % kept} * H);
  };
  for (const AttentionTile& run : batch.runs()) {
    const int end = run.first_token + run.num_tokens;
    float* tail = of_token[static_cast<size_t>(run.first_token)].tail;
    for (int t = run.first_token; t < end; ++t) {
      if (batch.kept_record(t) < 0) continue;
      float* to = reinterpret_cast<float*>(cache.record(layer, batch.kept_record(t)).data());
      std::copy_n(tail, int64_t{kept} * H, to);
      write_tail(run.first_token, t + 1, to);
    }
    write_tail(run.first_token, end, tail);
  }

  timer.next(Work::kOutput);
  parts_.out.add(table_, pool_, convolved, T, sum);
}

}  // namespace twofold
