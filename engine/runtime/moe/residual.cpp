#include "moe/residual.h"

#include <algorithm>
#include <cmath>

#include "host/work_clock.h"
#include "ops/attention/attention_batch.h"
#include "ops/linear.h"

namespace twofold {
namespace {

constexpr int kLanes = 16;

// Mean of squares in a fixed order, in lanes that a compiler turns into vectors.
float mean_square(const float* x, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  }
  double sum = 0;
  for (const float lane : lanes) sum += static_cast<double>(lane);
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return static_cast<float>(sum / static_cast<double>(n));
}

}  // namespace

void Residual::read(const float* streams, float* input, int num_tokens) {
  std::copy_n(streams, static_cast<size_t>(num_tokens) * static_cast<size_t>(hidden_size_), input);
}

void PostNorm::forward(const float* hidden, float* sum, StepState& step) {
  const int T = step.batch.num_tokens(), H = hidden_size();
  const double elements = static_cast<double>(T) * H;
  for_ranges(pool_, T, 1, work_us(12.0 * elements, 6.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> normed(static_cast<size_t>(H));
    for (int64_t t = first; t < first + count; ++t) {
      table_.rmsnorm(hidden + t * H, norm_, eps_, normed.data(), H);
      float* row = sum + t * H;
      for (int i = 0; i < H; ++i) row[i] = (row[i] + normed[static_cast<size_t>(i)]) * scale_;
    }
  });
}

void StreamMix::weigh(const kernels::KernelTable& table, ThreadPool& pool, const float* streams,
                      int num_tokens, std::vector<float>& weights) const {
  const WorkTimer timer(Work::kDenseFfn);
  const int64_t width = mix->columns(), R = rows();
  weights.resize(static_cast<size_t>(num_tokens) * static_cast<size_t>(R));
  const auto lock = pool.lock_scratch();
  linear(table, pool, {.x = streams, .ld = width}, num_tokens, *mix, nullptr, weights.data());
  const double elements = static_cast<double>(num_tokens) * static_cast<double>(width);
  for_ranges(pool, num_tokens, 1, work_us(4.0 * elements, 2.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      const float inverse = 1.0f / std::sqrt(mean_square(streams + t * width, width) + eps);
      float* const row = weights.data() + t * R;
      for (int64_t r = 0; r < R; ++r) {
        const float logit = row[r] * inverse * scale[r / num_streams] + base[r];
        row[r] = 1.0f / (1.0f + std::exp(-logit));
      }
    }
  });
}

void StreamMix::add_up(ThreadPool& pool, const float* streams, const std::vector<float>& weights,
                       int num_tokens, float* out) const {
  const int64_t H = hidden_size(), S = num_streams, R = rows();
  const double elements = static_cast<double>(num_tokens) * static_cast<double>(S * H);
  for_ranges(pool, num_tokens, 1, work_us(8.0 * elements, 2.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      float* const row = out + t * H;
      std::fill_n(row, H, 0.0f);
      for (int64_t s = 0; s < S; ++s) {
        const float weight = weights[static_cast<size_t>(t * R + s)] + offset;
        const float* const stream = streams + (t * S + s) * H;
        for (int64_t i = 0; i < H; ++i) row[i] += weight * stream[i];
      }
    }
  });
}

void HyperConnection::read(const float* streams, float* input, int num_tokens) {
  mix_.weigh(table_, pool_, streams, num_tokens, weights_);
  mix_.add_up(pool_, streams, weights_, num_tokens, input);
}

void HyperConnection::forward(const float* hidden, float* sum, StepState& step) {
  const int64_t H = hidden_size(), S = mix_.num_streams, R = mix_.rows(), T = step.batch.num_tokens();
  const double elements = static_cast<double>(T * S * H);
  for_ranges(pool_, T, 1, work_us(12.0 * elements, 2.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      const float* const output = hidden + t * H;
      for (int64_t s = 0; s < S; ++s) {
        const float weight = magnitude_ * weights_[static_cast<size_t>(t * R + S + s)] + mix_.offset;
        float* const stream = sum + (t * S + s) * H;
        for (int64_t i = 0; i < H; ++i) stream[i] += weight * output[i];
      }
    }
  });
}

void StreamHead::forward(const float* hidden, float* sum, StepState& step) {
  const int T = step.batch.num_tokens();
  mix_.weigh(table_, pool_, hidden, T, weights_);
  mix_.add_up(pool_, hidden, weights_, T, sum);
}

}  // namespace twofold
