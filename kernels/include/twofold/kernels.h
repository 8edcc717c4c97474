// The CPU kernels: plain functions on plain memory, in one table per instruction-set level, chosen at run
// time.
//
// Conventions. Activations are float32, row-major; a leading dimension (ldx, ldy, ldh, ...) is counted in
// elements. A weight matrix is [N, K] row-major and contiguous, so any sub-range of its rows is a weight
// matrix too. Its elements are of a DType; all are widened exactly and accumulated in float32.
//
// Determinism. The additions for one output element happen in an order fixed by its reduction length alone
// (K, head size, number of positions), never by M, N, by the tile the element fell into or by the thread that
// ran it. Within one level, batching, chunking and placement therefore cannot change a single bit of a
// result. Two levels differ by rounding, except in products with packed weights and f32 or q8 activations
// (packed_kernels.h), which give the same bits on all of them.
//
// Levels are composed: a level takes missing kernels from the one below.
//
// Nothing here allocates, throws, locks or keeps state; pointers must not overlap unless said so. M, N, K >=
// 0.
#pragma once
#include <cstdint>

#include "twofold/delta_kernels.h"
#include "twofold/packed_kernels.h"
#include "twofold/sampling_kernels.h"

namespace twofold::kernels {

// Elements of plain matrices and of the KV cache: float32; bfloat16 (the upper half of a float32, in a
// uint16_t); whole numbers of 8 bits; FP8 (E4M3: 4 bits of exponent, 3 of mantissa, no infinity). The last two stand
// for themselves times a scale that the caller applies; an FP8 is read as 2^-8 of its value, so that its bits
// are those of a half float.
enum class DType : uint8_t { kF32, kBF16, kI8, kFP8 };
inline constexpr int kNumDTypes = 4;
inline constexpr float kFP8Scale = 256.0f;
inline constexpr float kLargestFP8 = 448.0f;

constexpr int64_t element_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kBF16 ? 2 : 1;
}

struct Fp8 {
  uint8_t bits;
};

// Products with rows of one DType.
struct RowKernels {
  // y[m, n] = sum over k of x[m, k] * w[n, k].
  void (*matmul)(const float* x, int64_t ldx, const void* w, float* y, int64_t ldy, int M, int N,
                 int K) = nullptr;
  // out[m, d] += sum over j of p[m, j] * v[j, d], j ascending; v is [n, D] contiguous (attention's second
  // product).
  void (*weighted_sum)(const float* p, int64_t ldp, const void* v, float* out, int64_t ldo, int M, int n,
                       int D) = nullptr;
  void (*widen)(const void* x, float* y, int64_t n) = nullptr;
};

// Both products of attention with a block of positions by tiles, where a level has them: queries and the softmax's
// terms are rounded to bfloat16; keys and values of any DType but float32 are exact there. A block holds keys, or
// values, in an order of its own; in computed groups of 32 positions, positions not put keep their old content.
struct TileAttention {
  static constexpr int kPositions = 512;     // in a block
  static constexpr int kMostColumns = 1024;  // D
  static constexpr int64_t block_bytes(int D) { return int64_t{kPositions} * ((D + 31) / 32 * 32) * 2; }

  // Positions [first, first + count) of the block, from rows [count, D].
  void (*put_keys)(DType dtype, const void* rows, int first, int count, int D, void* block) = nullptr;
  void (*put_values)(DType dtype, const void* rows, int first, int count, int D, void* block) = nullptr;
  // scores[m * ld + j] = sum over d of q[m, d] * k[j, d] for the groups that positions [first, first + count) are in;
  // q is [M, D] contiguous.
  void (*scores)(const float* q, int M, const void* keys, int first, int count, int D, float* scores,
                 int64_t ld) = nullptr;
  // out[m, d] = sum over j of p[m * ld + j] * v[j, d] over the same groups; out is [M, D] contiguous.
  void (*weighted_sum)(const float* p, int64_t ld, int M, const void* values, int first, int count, int D,
                       float* out) = nullptr;
};

// Softmax statistics: the largest scaled score, and the sum of the terms.
struct SoftmaxSum {
  float peak, total;
};

struct KernelTable {
  const char* name = nullptr;  // "generic", "avx2", ...: what TWOFOLD_ISA takes

  RowKernels row_kernels[kNumDTypes] = {};
  const TileAttention* tile_attention = nullptr;  // may stay null

  // y = x / sqrt(mean(x^2) + eps) * w over n elements. y may be x.
  void (*rmsnorm)(const float* x, const float* w, float eps, float* y, int n) = nullptr;

  // Rotates the pairs (i, i + half) of v by the given cosines and sines, in place ("rotate half" convention).
  void (*rope)(float* v, const float* cosine, const float* sine, int half) = nullptr;

  // s = exp(s * scale - peak) in place, peak = max(s * scale). n >= 1. The caller divides by the sum.
  SoftmaxSum (*softmax_exp)(float* s, int n, float scale) = nullptr;

  // y = y + alpha * x.
  void (*axpy)(float alpha, const float* x, float* y, int n) = nullptr;

  // y = y * x.
  void (*multiply)(const float* x, float* y, int n) = nullptr;

  // out[i] = sum over m of w[m] * max(x[m, i], 0), m ascending: a learned indexer's scores of n positions.
  void (*relu_sum)(const float* x, int64_t ldx, const float* w, float* out, int M, int n) = nullptr;

  // Widening and rounding (to nearest even; a NaN stays a NaN) between the two element types.
  void (*bf16_to_f32)(const uint16_t* x, float* y, int64_t n) = nullptr;
  void (*f32_to_bf16)(const float* x, uint16_t* y, int64_t n) = nullptr;

  // Rounding to nearest even for the caches of attention: to whole numbers of -127 to 127, returning the scale
  // (largest magnitude / 127); to FP8, what is beyond its range becoming its largest. NaN becomes a number.
  float (*f32_to_i8)(const float* x, int8_t* y, int n) = nullptr;
  void (*f32_to_fp8)(const float* x, uint8_t* y, int n) = nullptr;

  // Products with packed weights, by WeightFormat; the encodings of their activations, by ActivationKind.
  FormatKernels formats[kNumWeightFormats] = {};
  EncodeFunction encode[kNumActivationKinds] = {};
  GatedActivation gated[kNumExpertActivations] = {};

  const RowKernels& rows_of(DType dtype) const { return row_kernels[static_cast<int>(dtype)]; }
  const FormatKernels& of(WeightFormat format) const { return formats[static_cast<int>(format)]; }
  void unpack_panel(WeightFormat format, const void* panel, int64_t columns, float* out) const {
    unpack[static_cast<int>(format)](static_cast<const uint8_t*>(panel), columns, out);
  }
  GatedActivation gated_as(ExpertActivation kind) const { return gated[static_cast<int>(kind)]; }
  EncodeFunction encode_as(ActivationKind kind) const { return encode[static_cast<int>(kind)]; }

  // All 32 rows of a panel as float32 [32, columns], by WeightFormat: the values of unpack_row(), of which those with a minimum
  // may be rounded once instead of twice.
  void (*unpack[kNumWeightFormats])(const uint8_t* panel, int64_t columns, float* out) = {};

  // Reads num_bytes of memory once, as fast as this level can, and returns something that depends on all of
  // them: what the weight-bound kernels are measured against.
  uint64_t (*read_all)(const void* memory, int64_t num_bytes) = nullptr;

  const SamplingKernels* sampling = nullptr;
  const DeltaKernels* delta = nullptr;
};

// The table of this process: the level that TWOFOLD_ISA names, or the best the CPU has, with each packed
// product taken from whichever level's was measured the fastest among those that give the same bits. Chosen
// once (a few milliseconds); throws std::invalid_argument (and will again) when TWOFOLD_ISA names a level
// that does not exist, cannot run here or was not compiled.
const KernelTable& kernel_table();

// Why that one, for logs: "best of generic, avx2, avx512 on this CPU; measured the fastest: avx512 for f32"
// or "TWOFOLD_ISA=avx2".
const char* kernel_table_reason();

// One level by name; nullptr when it does not exist, this CPU cannot run it or this build leaves it out.
const KernelTable* table_for_level(const char* name);

// Whether this CPU can run a level that this build leaves out.
bool level_left_out(const char* name);

// The names of all levels, best last; terminated by nullptr. A build may leave some out (cmake/Levels.cmake).
const char* const* level_names();

// What matters of the CPU (and is enabled by the operating system).
struct CpuFeatures {
  bool avx2, fma, f16c, avx_vnni, avx512f, avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16, amx_tile,
      amx_int8, amx_bf16;
};
CpuFeatures cpu_features();

}  // namespace twofold::kernels
