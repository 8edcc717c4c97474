// The CPU kernels: plain functions on plain memory, in one table per instruction-set level, chosen at run
// time.
//
// Conventions. Activations are float32, row-major; a leading dimension (ldx, ldy, ldh, ...) is counted in
// elements. A weight matrix is [N, K] row-major and contiguous, so any sub-range of its rows is a weight
// matrix too. Weights and KV entries are float32 or bfloat16 (the upper half of a float32, held in a
// uint16_t); a bfloat16 is widened exactly and everything is accumulated in float32.
//
// Determinism. The additions behind one output element happen in an order fixed by its reduction length alone
// (K, head size, number of positions), never by M, N, by the tile the element fell into or by the thread that
// ran it. Within one level, batching, chunking and placement therefore cannot change a single bit of a
// result. Two levels differ by rounding, except in products with packed weights and f32 or q8 activations
// (packed_kernels.h), which give the same bits on all of them.
//
// Levels are composed: what a level does not have of its own it takes from the one below.
//
// Nothing here allocates, throws, locks or keeps state; pointers must not overlap unless said so. M, N, K >=
// 0.
#pragma once
#include <cstdint>

#include "twofold/packed_kernels.h"
#include "twofold/sampling_kernels.h"

namespace twofold::kernels {

enum class DType : uint8_t { kF32, kBF16 };

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

struct KernelTable {
  const char* name = nullptr;  // "generic", "avx2", ...: what TWOFOLD_ISA takes

  // y[m, n] = sum over k of x[m, k] * w[n, k].
  void (*matmul_f32)(const float* x, int64_t ldx, const float* w, float* y, int64_t ldy, int M, int N,
                     int K) = nullptr;
  void (*matmul_bf16)(const float* x, int64_t ldx, const uint16_t* w, float* y, int64_t ldy, int M, int N,
                      int K) = nullptr;

  // out[m, d] += sum over j of p[m, j] * v[j, d], j ascending; v is [n, D] contiguous (attention's second
  // product).
  void (*weighted_sum_f32)(const float* p, int64_t ldp, const float* v, float* out, int64_t ldo, int M, int n,
                           int D) = nullptr;
  void (*weighted_sum_bf16)(const float* p, int64_t ldp, const uint16_t* v, float* out, int64_t ldo, int M,
                            int n, int D) = nullptr;

  // y = x / sqrt(mean(x^2) + eps) * w over n elements. y may be x.
  void (*rmsnorm)(const float* x, const float* w, float eps, float* y, int n) = nullptr;

  // Rotates the pairs (i, i + half) of v by the given cosines and sines, in place ("rotate half" convention).
  void (*rope)(float* v, const float* cosine, const float* sine, int half) = nullptr;

  // s = exp(s * scale - max(s * scale)) in place; returns the sum. n >= 1. Dividing by it is the caller's
  // affair.
  float (*softmax_exp)(float* s, int n, float scale) = nullptr;

  // y = y + alpha * x.
  void (*axpy)(float alpha, const float* x, float* y, int n) = nullptr;

  // Widening and rounding (to nearest even; a NaN stays a NaN) between the two element types.
  void (*bf16_to_f32)(const uint16_t* x, float* y, int64_t n) = nullptr;
  void (*f32_to_bf16)(const float* x, uint16_t* y, int64_t n) = nullptr;

  // Products with packed weights, by WeightFormat; the encodings of their activations, by ActivationKind.
  FormatKernels formats[kNumWeightFormats] = {};
  EncodeFunction encode[kNumActivationKinds] = {};
  SiluMul silu_mul = nullptr;

  const FormatKernels& of(WeightFormat format) const { return formats[static_cast<int>(format)]; }
  EncodeFunction encode_as(ActivationKind kind) const { return encode[static_cast<int>(kind)]; }

  // Reads num_bytes of memory once, as fast as this level can, and returns something that depends on all of
  // them: what the weight-bound kernels are measured against.
  uint64_t (*read_all)(const void* memory, int64_t num_bytes) = nullptr;

  const SamplingKernels* sampling = nullptr;
};

// The table of this process: the level that TWOFOLD_ISA names, or the best the CPU has, with each packed
// product taken from whichever level's was measured the fastest among those that give the same bits. Chosen
// once (a few milliseconds); throws std::invalid_argument (and will again) when TWOFOLD_ISA names a level
// that does not exist or cannot run here.
const KernelTable& kernel_table();

// Why that one, for logs: "best of generic, avx2, avx512 on this CPU; measured the fastest: avx512 for f32"
// or "TWOFOLD_ISA=avx2".
const char* kernel_table_reason();

// One level by name, for tests and benchmarks; nullptr when it does not exist or this CPU cannot run it.
const KernelTable* table_for_level(const char* name);

// The amx level with its tile instructions carried out in plain code, for tests on CPUs without them; nullptr
// without AVX-512 and VNNI. No level: it is found by this function only.
inline constexpr const char* kEmulatedAmx = "amx_emulated";
const KernelTable* emulated_amx();

// The names of all levels this build knows, best last; terminated by nullptr.
const char* const* level_names();

// What matters of the CPU (and is enabled by the operating system).
struct CpuFeatures {
  bool avx2, fma, f16c, avx_vnni, avx512f, avx512bw, avx512vl, avx512dq, avx512_vnni, avx512_bf16, amx_tile,
      amx_int8, amx_bf16;
};
CpuFeatures cpu_features();

}  // namespace twofold::kernels
