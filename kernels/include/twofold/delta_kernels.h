// What a gated delta net (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464) asks of the CPU: the
// short convolution of its projections and the recurrence of a head's state.
#pragma once
#include <cstdint>

namespace twofold::kernels {

// A head's state [K, values] lies in blocks of so many columns, [K, kDeltaColumns] each, the last one filled up with
// zeros: a block of 128 keys is 16 KiB and stays in the first-level cache while all tokens of a chunk pass it.
inline constexpr int kDeltaColumns = 32;

// Tokens of one sequence as one block sees them. All data of token t is t strides after that of token 0.
struct DeltaTokens {
  const float *q, *k;  // [K], normalised
  int64_t key_stride;
  const float* v;  // [kDeltaColumns]
  float* out;      // [kDeltaColumns]
  int64_t value_stride;
  const float *decay, *beta, *kq;  // a number each; kq = k . q
  int64_t gate_stride;
};

struct DeltaKernels {
  // For one token after the other: S = decay S; delta = beta (v - S^T k); S = S + k delta^T; out = S^T q. What is
  // computed is S^T k and S^T q of the state before the token, so that one pass carries a token into the state and
  // multiplies it for the next: the bits do not depend on where a call begins or ends.
  void (*delta_rule)(const DeltaTokens& tokens, int num_tokens, float* state, int K) = nullptr;

  // y[c] = silu(sum over j of w[j * ldw + c] * rows[j][c]) over n channels, j ascending from 0 to taps - 1.
  void (*short_convolution)(const float* const* rows, int taps, const float* w, int64_t ldw, float* y,
                            int n) = nullptr;

  // y = y * sigmoid(x).
  void (*sigmoid_multiply)(const float* x, float* y, int n) = nullptr;
};

}  // namespace twofold::kernels
