// The scalar reference of the gated delta net.
#include <cmath>

#include "levels.h"

namespace twofold::kernels {
namespace {

void delta_rule(const DeltaTokens& tokens, int num_tokens, float* state, int K) {
  for (int t = 0; t < num_tokens; ++t) {
    const float* q = tokens.q + t * tokens.key_stride;
    const float* k = tokens.k + t * tokens.key_stride;
    const float decay = tokens.decay[t * tokens.gate_stride], beta = tokens.beta[t * tokens.gate_stride];
    const float kq = tokens.kq[t * tokens.gate_stride];
    float seen[kDeltaColumns] = {}, asked[kDeltaColumns] = {}, delta[kDeltaColumns];
    for (int i = 0; i < K; ++i) {
      const float* row = state + int64_t{i} * kDeltaColumns;
      for (int c = 0; c < kDeltaColumns; ++c) {
        seen[c] += k[i] * row[c];
        asked[c] += q[i] * row[c];
      }
    }
    for (int c = 0; c < kDeltaColumns; ++c) {
      delta[c] = beta * (tokens.v[t * tokens.value_stride + c] - decay * seen[c]);
      tokens.out[t * tokens.value_stride + c] = decay * asked[c] + kq * delta[c];
    }
    for (int i = 0; i < K; ++i) {
      float* row = state + int64_t{i} * kDeltaColumns;
      for (int c = 0; c < kDeltaColumns; ++c) row[c] = decay * row[c] + k[i] * delta[c];
    }
  }
}

void short_convolution(const float* const* rows, int taps, const float* w, int64_t ldw, float* y, int n) {
  for (int c = 0; c < n; ++c) {
    float sum = 0;
    for (int j = 0; j < taps; ++j) sum += w[j * ldw + c] * rows[j][c];
    y[c] = sum / (1.0f + std::exp(-sum));
  }
}

void sigmoid_multiply(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] /= 1.0f + std::exp(-x[i]);
}

constexpr DeltaKernels kKernels = {delta_rule, short_convolution, sigmoid_multiply};
constexpr KernelTable kPart = {.delta = &kKernels};

}  // namespace

const KernelTable* generic_delta() { return &kPart; }

}  // namespace twofold::kernels
