// Products of activations with packed weights (weight_format.h): a part of KernelTable (kernels.h).
//
// Activations are encoded once per row and then read by every weight row: f32 as they are, bf16 (rounded to
// nearest even) where the level multiplies bf16 directly, q8 (8-bit integers, one scale per 32 columns) for
// integer weights, q8_token (the same with one scale per row) for integer weights that have one scale per row, too.
// A level defines which encoding it takes per format; an encoding's bytes are the same on
// every level.
//
// Determinism: the additions for one output element happen in an order fixed by K and the format, never by
// M, N, tile or thread; integer sums are exact. Within one level batching, chunking and placement cannot
// change a bit.
#pragma once
#include <cstdint>

#include "twofold/expert.h"
#include "twofold/weight_format.h"

namespace twofold::kernels {

// Bytes of one encoded row of K columns, a multiple of 64. Rows may lie further apart.
//   f32, bf16: K elements, zeros to a multiple of 256 columns.
//   q8: i8 q[P], f32 scale[P / 32], i32 sum16[P / 16] (of q, per subblock of 16), P = K rounded up to 256;
//       x = scale * q, scale = amax / 127; a subblock below kSmallestQ8 is zero, one with an infinity or NaN has a
//       NaN for scale.
//   q8_token: i8 q[P], f32 scale, i32 sum (of q), with one scale for the row made as that of a subblock.
constexpr int64_t activation_columns(int64_t K) { return (K + 255) / 256 * 256; }
constexpr int64_t activation_row_bytes(ActivationKind kind, int64_t K) {
  const int64_t P = activation_columns(K);
  if (kind == ActivationKind::kF32) return 4 * P;
  if (kind == ActivationKind::kBF16) return 2 * P;
  if (kind == ActivationKind::kQ8Token) return P + 64;
  return P + P / 8 + P / 4;
}

// Where rows should lie apart: an odd number of cache lines, so that the same column of several rows does not
// share one set of a cache.
constexpr int64_t activation_row_stride(ActivationKind kind, int64_t K) {
  return activation_row_bytes(kind, K) | 64;
}

inline constexpr float kSmallestQ8 = 1e-35f;

// Encodes columns [first, first + count) of M rows; first is a multiple of 32, and count too unless first +
// count == K. The call that encodes the last column also writes the zeros after it. x points to column `first`.
// q8_token takes whole rows only: first == 0, count == K.
using EncodeFunction = void (*)(const float* x, int64_t ldx, void* rows, int64_t row_bytes, int M, int first,
                                int count, int K);

// y[m, n] = x_m . w_n for the N rows of consecutive panels (N > 32 * (panels - 1)). x are encoded rows. y is
// written for n < N only.
using PackedMatmul = void (*)(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy,
                              int M, int N, int K);

struct FormatKernels {
  ActivationKind activation = ActivationKind::kF32;
  PackedMatmul matmul = nullptr;
  const char* level =
      nullptr;  // whose it is: a level without a kernel of its own for a format takes a lower one's
};

// h = gated(activation, limit, gate, up) (expert.h), elementwise over n; h may be gate.
using GatedActivation = void (*)(const float* gate, const float* up, float* h, int n, float limit);

}  // namespace twofold::kernels
