#include "moe/residual.h"

#include <algorithm>
#include <cmath>

#include "host/work_clock.h"
#include "ops/attention/attention_batch.h"
#include "ops/linear.h"

namespace twofold {
namespace {

constexpr int kLanes = 16;
constexpr int kGatedTokens = 256;  // whose gates are computed together

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

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

void WeightedStreams::read(const float* streams, int num_tokens, float* input, float* outputs) {
  const WorkTimer timer(Work::kDenseFfn);
  const StreamWeights& of = weights_;
  const int64_t width = of.mix->columns(), R = of.mix->rows(), S = num_streams(), H = hidden_size();
  shares_.resize(static_cast<size_t>(num_tokens * R));
  matrix_.resize(of.rounds > 0 ? static_cast<size_t>(num_tokens * S * S) : 0);
  const auto lock = pool_.lock_scratch();
  linear(table_, pool_, {.x = streams, .ld = width}, num_tokens, *of.mix, nullptr, shares_.data());
  const double elements = static_cast<double>(num_tokens) * static_cast<double>(width);
  for_ranges(pool_, num_tokens, 1, work_us(12.0 * elements, 4.0 * elements),
             [&](int64_t first, int64_t count) {
               for (int64_t t = first; t < first + count; ++t) {
                 const float inverse = 1.0f / std::sqrt(mean_square(streams + t * width, width) + of.eps);
                 float* const row = shares_.data() + t * R;
                 const int64_t num_weights = of.rounds > 0 ? 2 * S : R;
                 for (int64_t r = 0; r < R; ++r) {
                   row[r] = row[r] * inverse * of.scale[std::min(r, num_weights) / S] + of.base[r];
                   if (r < num_weights) row[r] = sigmoid(row[r]);
                 }
                 float* const sum = input + t * H;
                 std::fill_n(sum, H, 0.0f);
                 for (int64_t s = 0; s < S; ++s) {
                   const float weight = row[s] + of.offset;
                   const float* const stream = streams + (t * S + s) * H;
                   for (int64_t i = 0; i < H; ++i) sum[i] += weight * stream[i];
                 }
                 for (int64_t s = 0; outputs != nullptr && s < S; ++s)
                   outputs[t * S + s] = of.magnitude * row[S + s] + of.output_offset;
                 if (outputs == nullptr || of.rounds == 0) continue;
                 float* const matrix = std::copy_n(row + 2 * S, S * S, matrix_.data() + t * S * S) - S * S;
                 make_doubly_stochastic(matrix, static_cast<int>(S), of.rounds, of.offset);
               }
             });
}

void GatedStreams::read(const float* streams, int num_tokens, float* input, float* outputs) {
  const WorkTimer timer(Work::kDenseFfn);
  const auto lock = pool_.lock_scratch();
  for (int first = 0; first < num_tokens; first += kGatedTokens)
    read_some(streams, first, std::min(kGatedTokens, num_tokens - first), input, outputs);
}

void GatedStreams::read_some(const float* streams, int begin, int num_tokens, float* input, float* outputs) {
  const int64_t S = num_streams(), H = hidden_size(), width = S * H, rank = gates_.down->rows();
  const float share = 1.0f / static_cast<float>(S);
  const size_t T = static_cast<size_t>(num_tokens);
  normed_.resize(T * static_cast<size_t>(width));
  open_.resize(normed_.size());
  low_.resize(T * static_cast<size_t>(rank));
  const double elements = static_cast<double>(num_tokens) * static_cast<double>(width);
  for_ranges(pool_, num_tokens * S, 1, work_us(8.0 * elements, 4.0 * elements),
             [&](int64_t first, int64_t count) {
               for (int64_t row = first; row < first + count; ++row)
                 table_.rmsnorm(streams + (begin * S + row) * H, gates_.norm + row % S * H, gates_.eps,
                                normed_.data() + row * H, static_cast<int>(H));
             });
  const InputRows rows{.x = normed_.data(), .ld = width, .first = begin};
  linear(table_, pool_, rows, num_tokens, *gates_.down, nullptr, low_.data());
  for (float& x : low_) x = x * share * sigmoid(x * share);
  if (outputs != nullptr) {
    float* const own = outputs + begin * S;
    linear(table_, pool_, rows, num_tokens, *gates_.inject, nullptr, own);
    for (int64_t i = 0; i < num_tokens * S; ++i) own[i] = 2.0f * sigmoid(own[i] * share);
  }
  linear(table_, pool_, {.x = low_.data(), .ld = rank, .first = begin}, num_tokens, *gates_.up, nullptr,
         open_.data());
  for_ranges(
      pool_, num_tokens, 1, work_us(8.0 * elements, 20.0 * elements), [&](int64_t first, int64_t count) {
        for (int64_t t = first; t < first + count; ++t) {
          float* const mean = input + (begin + t) * H;
          std::fill_n(mean, H, 0.0f);
          for (int64_t s = 0; s < S; ++s) {
            float* const stream = normed_.data() + t * width + s * H;
            table_.delta->sigmoid_multiply(open_.data() + t * width + s * H, stream, static_cast<int>(H));
            table_.axpy(share, stream, mean, static_cast<int>(H));
          }
        }
      });
}

void HyperConnection::read(const float* streams, float* input, int num_tokens) {
  outputs_.resize(static_cast<size_t>(num_tokens) * static_cast<size_t>(num_streams()));
  mix_->read(streams, num_tokens, input, outputs_.data());
}

void HyperConnection::forward(const float* hidden, float* sum, StepState& step) {
  const int64_t H = hidden_size(), S = num_streams(), T = step.batch.num_tokens();
  const float* const matrix = mix_->matrix();
  const double elements = static_cast<double>(T * S * H);
  for_ranges(pool_, T, 1, work_us(12.0 * elements, 2.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> mixed(static_cast<size_t>(matrix == nullptr ? 0 : S * H));
    for (int64_t t = first; t < first + count; ++t) {
      const float* const output = hidden + t * H;
      float* const streams = sum + t * S * H;
      std::fill(mixed.begin(), mixed.end(), 0.0f);
      for (int64_t from = 0; matrix != nullptr && from < S; ++from) {
        for (int64_t s = 0; s < S; ++s) {
          const float weight = matrix[(t * S + from) * S + s];
          for (int64_t i = 0; i < H; ++i) mixed[size_t(s * H + i)] += weight * streams[from * H + i];
        }
      }
      std::copy(mixed.begin(), mixed.end(), streams);
      for (int64_t s = 0; s < S; ++s) {
        const float weight = outputs_[static_cast<size_t>(t * S + s)];
        for (int64_t i = 0; i < H; ++i) streams[s * H + i] += weight * output[i];
      }
    }
  });
}

void StreamHead::forward(const float* hidden, float* sum, StepState& step) {
  mix_->read(hidden, step.batch.num_tokens(), sum, nullptr);
}

}  // namespace twofold
