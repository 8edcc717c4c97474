#include "moe/ngram_input.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "host/work_clock.h"
#include "ops/attention/attention_batch.h"
#include "ops/linear.h"

namespace twofold {
namespace {

constexpr int kLanes = 16;

// In a fixed order, in lanes that a compiler turns into vectors.
float product(const float* a, const float* b, int n) {
  std::array<float, kLanes> lanes{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[size_t(lane)] += a[i + lane] * b[i + lane];
  for (; i < n; ++i) lanes[size_t(i % kLanes)] += a[i] * b[i];
  float total = 0;
  for (const float lane : lanes) total += lane;
  return total;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void NgramInput::gate(const float* streams, const float* key, const float* value, float* v, float* normed,
                      float* room) const {
  const int H = hidden_size();
  const float root = std::sqrt(static_cast<float>(H));
  for (int64_t s = 0; s < num_streams(); ++s) {
    float *const of_key = room, *const of_query = room + H, *const out = v + s * H;
    table_.rmsnorm(key + s * H, parts_.key_norm + s * H, parts_.eps, of_key, H);
    table_.rmsnorm(streams + s * H, parts_.query_norm + s * H, parts_.eps, of_query, H);
    const float k = product(of_key, of_query, H) / root;
    const float weight = sigmoid(std::copysign(k == 0 ? 0.0f : std::sqrt(std::max(std::abs(k), 1e-6f)), k));
    for (int i = 0; i < H; ++i) out[i] = weight * value[i];
    table_.rmsnorm(out, parts_.conv_norm + s * H, parts_.eps, normed + s * H, H);
  }
}

void NgramInput::forward(const float* hidden, float* sum, StepState& step) {
  const LayerInputRows& inputs = step.layer_inputs;
  const int64_t T = step.batch.num_tokens(), H = hidden_size(), W = parts_.key->rows();
  if (inputs.rows == nullptr || parts_.first + parts_.value->columns() > inputs.width) {
    throw KernelFailure("NgramInput: the step's inputs have " + std::to_string(inputs.width) +
                        " elements a token; expected at least " +
                        std::to_string(parts_.first + parts_.value->columns()));
  }
  parts_.place.check("NgramInput", step.batch, step.cache, parts_.conv.record_bytes());
  const WorkTimer timer(Work::kDenseFfn);
  const auto lock = pool_.lock_scratch();
  keys_.resize(static_cast<size_t>(T * W));
  gated_.resize(keys_.size());
  normed_.resize(keys_.size());
  values_.resize(static_cast<size_t>(T * H));
  const InputRows rows{.x = inputs.rows + parts_.first, .ld = inputs.width};
  linear(table_, pool_, rows, static_cast<int>(T), *parts_.key, nullptr, keys_.data());
  linear(table_, pool_, rows, static_cast<int>(T), *parts_.value, nullptr, values_.data());
  const double elements = static_cast<double>(T * W);
  for_ranges(pool_, T, 1, work_us(32.0 * elements, 16.0 * elements), [&](int64_t first, int64_t count) {
    std::vector<float> room(static_cast<size_t>(2 * H));
    for (int64_t t = first; t < first + count; ++t) {
      gate(hidden + t * W, keys_.data() + t * W, values_.data() + t * H, gated_.data() + t * W,
           normed_.data() + t * W, room.data());
    }
  });
  // The keys are used up: their place takes what the convolution gives.
  parts_.conv.forward(pool_, step.batch, step.cache, parts_.place, normed_.data(), W, keys_.data(),
                      [&](int t, const float* y) {
                        float* const out = sum + t * W;
                        const float* const v = gated_.data() + t * W;
                        for (int64_t i = 0; i < W; ++i) out[i] += v[i] + y[i] * sigmoid(y[i]);
                      });
}

}  // namespace twofold
