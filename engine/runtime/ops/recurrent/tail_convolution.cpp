#include "ops/recurrent/tail_convolution.h"

#include <algorithm>
#include <string>
#include <vector>

#include "ops/linear.h"

namespace twofold {

void RecordPlace::check(const char* what, AttentionBatch& batch, const StateCache& cache,
                        int64_t bytes) const {
  if (layer < 0 || layer >= cache.num_layers()) {
    throw KernelFailure(std::string(what) + ": layer is " + std::to_string(layer) +
                        "; the cache has layers 0 to " + std::to_string(cache.num_layers() - 1));
  }
  if (at < 0 || cache.record_bytes(layer) < at + bytes) {
    throw KernelFailure(std::string(what) + ": a record of the cache has " +
                        std::to_string(cache.record_bytes(layer)) + " bytes in layer " +
                        std::to_string(layer) + "; expected at least " + std::to_string(at + bytes));
  }
  batch.check_records(cache);
}

void TailConvolution::forward(ThreadPool& pool, AttentionBatch& batch, const StateCache& cache,
                              const RecordPlace& place, const float* rows, int64_t ld, float* y,
                              FunctionRef<void(int token, float* y)> finish) const {
  const int T = batch.num_tokens(), W = width;
  struct Place {
    const AttentionTile* run;
    float* tail;
  };
  std::vector<Place> of_token(static_cast<size_t>(T));
  for (const AttentionTile& run : batch.runs()) {
    float* const tail = place.record(cache, batch.record(run.first_token));
    std::fill_n(of_token.begin() + run.first_token, run.num_tokens, Place{&run, tail});
  }
  const double elements = static_cast<double>(T) * W;
  for_ranges(pool, T, 1, work_us(4.0 * (num_taps + 3) * elements, 2.0 * num_taps * elements),
             [&](int64_t first, int64_t count) {
               for (int t = static_cast<int>(first); t < first + count; ++t) {
                 const auto& [run, tail] = of_token[static_cast<size_t>(t)];
                 const int position = batch.position(t), begin = batch.position(run->first_token);
                 float* const out = y + int64_t{t} * W;
                 std::fill_n(out, W, 0.0f);
                 for (int j = 0; j < num_taps; ++j) {
                   const int back = kept() - j * dilation;
                   if (position < back) continue;  // no inputs before the sequence
                   const float* from = position - back >= begin
                                           ? rows + int64_t{t - back} * ld
                                           : tail + int64_t{(position - back) % kept()} * W;
                   const float* const tap = taps + int64_t{j} * W;
                   for (int i = 0; i < W; ++i) out[i] += tap[i] * from[i];
                 }
                 finish(t, out);
               }
             });
  const auto write_tail = [&](int first, int end, float* tail) {
    for (int t = std::max(first, end - kept()); t < end; ++t)
      std::copy_n(rows + int64_t{t} * ld, W, tail + int64_t{batch.position(t) % kept()} * W);
  };
  for (const AttentionTile& run : batch.runs()) {
    const int end = run.first_token + run.num_tokens;
    float* const tail = of_token[static_cast<size_t>(run.first_token)].tail;
    for (int t = run.first_token; t < end; ++t) {
      if (batch.kept_record(t) < 0) continue;
      float* const to = place.record(cache, batch.kept_record(t));
      std::copy_n(tail, int64_t{kept()} * W, to);
      write_tail(run.first_token, t + 1, to);
    }
    write_tail(run.first_token, end, tail);
  }
}

}  // namespace twofold
