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

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides S values, `stride` apart, by their sum + offset.
void divide_by_sum(float* values, int S, int stride, float offset) {
  float sum = offset;
  for (int i = 0; i < S; ++i) sum += values[i * stride];
  for (int i = 0; i < S; ++i) values[i * stride] /= sum;
}

// Logits [S, S] become a matrix whose rows and columns have sums of about 1: softmax by row, then Sinkhorn's iteration.
void make_doubly_stochastic(float* matrix, int S, int rounds, float offset) {
  for (int row = 0; row < S; ++row) {
    float* const values = matrix + row * S;
    const float most = *std::max_element(values, values + S);
    for (int i = 0; i < S; ++i) values[i] = std::exp(values[i] - most);
    divide_by_sum(values, S, 1, 0);
    for (int i = 0; i < S; ++i) values[i] += offset;
  }
  for (int round = 0; round < rounds; ++round) {
    for (int row = 0; round > 0 && row < S; ++row) divide_by_sum(matrix + row * S, S, 1, offset);
    for (int column = 0; column < S; ++column) divide_by_sum(matrix + column, S, S, offset);
  }
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

void GatedNorm::read(const float* stream, float* input, int num_tokens) {
  const WorkTimer timer(Work::kDenseFfn);
  const int64_t T = num_tokens, H = hidden_size(), R = down_.rows();
  const auto lock = pool_.lock_scratch();
  norm_rows(table_, pool_, stream, norm_, eps_, input, num_tokens, static_cast<int>(H));
  low_.resize(static_cast<size_t>(T * R));
  gates_.resize(static_cast<size_t>(T * H));
  linear(table_, pool_, {.x = input, .ld = H}, num_tokens, down_, nullptr, low_.data());
  for (float& x : low_) x *= sigmoid(x);
  linear(table_, pool_, {.x = low_.data(), .ld = R}, num_tokens, up_, nullptr, gates_.data());
  const double elements = static_cast<double>(T * H);
  for_ranges(pool_, T, 1, work_us(12.0 * elements, 20.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t)
      table_.delta->sigmoid_multiply(gates_.data() + t * H, input + t * H, static_cast<int>(H));
  });
}

void GatedNorm::forward(const float* hidden, float* sum, StepState& step) {
  const int64_t n = int64_t{step.batch.num_tokens()} * hidden_size();
  for (int64_t i = 0; i < n; ++i) sum[i] += hidden[i];
}

void StreamMix::weigh(const kernels::KernelTable& table, ThreadPool& pool, const float* streams,
                      int num_tokens, std::vector<float>& weights) const {
  const WorkTimer timer(Work::kDenseFfn);
  const int64_t width = mix->columns(), R = rows(), num_weights = int64_t{groups} * num_streams;
  weights.resize(static_cast<size_t>(num_tokens) * static_cast<size_t>(R));
  const auto lock = pool.lock_scratch();
  linear(table, pool, {.x = streams, .ld = width}, num_tokens, *mix, nullptr, weights.data());
  const double elements = static_cast<double>(num_tokens) * static_cast<double>(width);
  for_ranges(pool, num_tokens, 1, work_us(4.0 * elements, 2.0 * elements), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      const float inverse = 1.0f / std::sqrt(mean_square(streams + t * width, width) + eps);
      float* const row = weights.data() + t * R;
      for (int64_t r = 0; r < R; ++r) {
        const float logit = row[r] * inverse * scale[std::min<int64_t>(r / num_streams, groups)] + base[r];
        row[r] = r < num_weights ? sigmoid(logit) : logit;
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
  if (write_.rounds == 0) return;
  const int64_t S = mix_.num_streams, R = mix_.rows();
  const double steps = static_cast<double>(num_tokens) * static_cast<double>(S * S * write_.rounds);
  for_ranges(pool_, num_tokens, 1, work_us(0, 40.0 * steps), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      make_doubly_stochastic(weights_.data() + t * R + 2 * S, static_cast<int>(S), write_.rounds,
                             mix_.offset);
    }
  });
}

void HyperConnection::forward(const float* hidden, float* sum, StepState& step) {
  const int64_t H = hidden_size(), S = mix_.num_streams, R = mix_.rows(), T = step.batch.num_tokens();
  const double elements = static_cast<double>(T * S * H);
  for_ranges(pool_, T, 1, work_us(12.0 * elements, 2.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> mixed(static_cast<size_t>(write_.rounds == 0 ? 0 : S * H));
    for (int64_t t = first; t < first + count; ++t) {
      const float *const output = hidden + t * H, *const weights = weights_.data() + t * R;
      float* const streams = sum + t * S * H;
      std::fill(mixed.begin(), mixed.end(), 0.0f);
      for (int64_t from = 0; write_.rounds > 0 && from < S; ++from) {
        for (int64_t s = 0; s < S; ++s) {
          const float weight = weights[2 * S + from * S + s];
          for (int64_t i = 0; i < H; ++i) mixed[size_t(s * H + i)] += weight * streams[from * H + i];
        }
      }
      std::copy(mixed.begin(), mixed.end(), streams);
      for (int64_t s = 0; s < S; ++s) {
        const float weight = write_.magnitude * weights[S + s] + write_.offset;
        for (int64_t i = 0; i < H; ++i) streams[s * H + i] += weight * output[i];
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
