// The kernels of sampling_kernels.h, written once over vectors of TWOFOLD_VECTOR_BYTES; a file for each level
// defines that and is compiled with its own flags. Everything lives in an anonymous namespace, so no
// instantiation is shared between levels. No standard library here, for the same reason.
#pragma once
#include <cstdint>
#if TWOFOLD_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#include "levels.h"

namespace twofold::kernels {
namespace {

struct SamplingLanes {
  static constexpr int kBytes = TWOFOLD_VECTOR_BYTES;
  static constexpr int kDoubles = kBytes / 8, kFloats = kBytes / 4;
  static constexpr int kSumLanes = 8, kGroup = 64;
  static constexpr double kLog2E = 1.4426950408889634;
  typedef double D __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef float F __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef int32_t FI __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef float Half __attribute__((vector_size(TWOFOLD_VECTOR_BYTES / 2)));
  typedef int32_t HalfI __attribute__((vector_size(TWOFOLD_VECTOR_BYTES / 2)));

  template <class V>
  static inline __attribute__((always_inline)) V load(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }

  // (highest - x) * factor, at most 1000: 2 to minus that is a normal number, and too small to count.
  static inline __attribute__((always_inline)) D exponent(const float* x, double highest, double factor) {
#if TWOFOLD_VECTOR_BYTES == 64
    const D wide = (D)_mm512_cvtps_pd(_mm256_loadu_ps(x));  // GCC converts halves and joins them
#else
    const D wide = __builtin_convertvector(load<Half>(x), D);
#endif
    const D limit = D{} + 1000.0, z = (highest - wide) * factor;
    return z < limit ? z : limit;  // also of a NaN
  }

  // 2^(bits - z) for z in [0, 1000] and whole bits, within 8e-16 of it: 2^n * 2^r with |r| <= 1 / 2; of z = 0
  // exactly. The polynomial meets (2^r - 1) / r at the Chebyshev nodes.
  static inline __attribute__((always_inline)) D exp2_minus(D z, double bits) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: what is added to it loses its fraction
    const D shifted = (kRound + bits) - z;
    const D r = ((kRound + bits) - shifted) - z;
    // Short chains instead of one long one, which fills the processor's queues: a sixth of the time.
    constexpr const double* c = kPolynomial;
    const D r2 = r * r, r4 = r2 * r2;
    const D low = (r * c[0] + 1.0) + r2 * (r * c[2] + c[1]);
    const D middle = (r * c[4] + c[3]) + r2 * (r * c[6] + c[5]);
    const D high = (r * c[8] + c[7]) + r2 * c[9];
    const D p = low + r4 * (middle + r4 * high);
    return (D)((I)p + ((I)shifted << 52));
  }

  static inline __attribute__((always_inline)) void weigh_vector(const float* x, const WeightScale& scale,
                                                                 uint64_t* weight, int32_t* bucket) {
    constexpr double kWhole = 4503599627370496.0;  // 2^52: the number lies in the low bits of a sum with it
    const D z = exponent(x, scale.highest, scale.factor);
    const I w = (I)(exp2_minus(z, scale.bits) + kWhole) & ((int64_t{1} << 52) - 1);
    __builtin_memcpy(weight, &w, sizeof w);
    const D last = D{} + scale.last_bucket;
    D b = z * scale.per_bucket;
    b = b < last ? b : last;
    const HalfI whole = __builtin_convertvector(b, HalfI);
    __builtin_memcpy(bucket, &whole, sizeof whole);
  }

  static void weigh(const float* x, int n, const WeightScale& scale, uint64_t* weight, int32_t* bucket) {
    int i = 0;
    for (; i + kDoubles <= n; i += kDoubles) weigh_vector(x + i, scale, weight + i, bucket + i);
    if (i == n) return;
    float rest[kDoubles] = {};
    uint64_t weights[kDoubles];
    int32_t buckets[kDoubles];
    for (int c = 0; i + c < n; ++c) rest[c] = x[i + c];
    weigh_vector(rest, scale, weights, buckets);
    for (int c = 0; i < n; ++i, ++c) weight[i] = weights[c], bucket[i] = buckets[c];
  }

  // While vectors of one group are weighed, elements of the group before are added to their buckets:
  // additions and arithmetic use different units, and waiting for either alone took half as long again.
  template <bool kCounts>
  static void tally_vectors(const float* x, int64_t num_groups, const WeightScale& scale, uint64_t* mass,
                            uint32_t* count) {
    alignas(64) uint64_t weights[2][kGroup] = {};
    alignas(64) int32_t buckets[2][kGroup] = {};
    const auto add = [&](int turn, int at) __attribute__((always_inline)) {
      mass[buckets[turn][at]] += weights[turn][at];
      if constexpr (kCounts) ++count[buckets[turn][at]];
    };
    int turn = 0;
    for (int64_t group = 0; group < num_groups; ++group, turn ^= 1, x += kGroup) {
      for (int at = 0; at < kGroup; at += kDoubles) {
        weigh_vector(x + at, scale, weights[turn] + at, buckets[turn] + at);
#pragma GCC unroll 8
        for (int c = 0; c < kDoubles; ++c) add(turn ^ 1, at + c);
      }
    }
    for (int at = 0; at < kGroup; ++at) add(turn ^ 1, at);
    if constexpr (kCounts) count[0] -= kGroup;  // those before the first group, which weigh nothing
  }

  static void tally(const float* x, int64_t n, const WeightScale& scale, uint64_t* mass, uint32_t* count) {
    const int64_t num_groups = n / kGroup;
    (count != nullptr ? tally_vectors<true> : tally_vectors<false>)(x, num_groups, scale, mass, count);
    uint64_t weights[kGroup];
    int32_t buckets[kGroup];
    const int rest = static_cast<int>(n - num_groups * kGroup);
    weigh(x + num_groups * kGroup, rest, scale, weights, buckets);
    for (int c = 0; c < rest; ++c) {
      mass[buckets[c]] += weights[c];
      if (count != nullptr) ++count[buckets[c]];
    }
  }

  static void extremes(const float* x, int64_t n, float* lowest, float* highest) {
    constexpr float kInfinity = __builtin_inff();
    F low[2] = {F{} + kInfinity, F{} + kInfinity}, high[2] = {F{} - kInfinity, F{} - kInfinity};
    int64_t i = 0;
    for (; i + 2 * kFloats <= n; i += 2 * kFloats) {
      for (int part = 0; part < 2; ++part) {
        const F v = load<F>(x + i + part * kFloats);
        low[part] = v < low[part] ? v : low[part];
        high[part] = v > high[part] ? v : high[part];
      }
    }
    low[0] = low[0] < low[1] ? low[0] : low[1];
    high[0] = high[0] > high[1] ? high[0] : high[1];
    float lows[kFloats], highs[kFloats];
    __builtin_memcpy(lows, &low[0], sizeof lows);
    __builtin_memcpy(highs, &high[0], sizeof highs);
    for (int half = kFloats / 2; half > 0; half /= 2) {
      for (int c = 0; c < half; ++c) {
        lows[c] = lows[c] < lows[c + half] ? lows[c] : lows[c + half];
        highs[c] = highs[c] > highs[c + half] ? highs[c] : highs[c + half];
      }
    }
    float least = lows[0], most = highs[0];
    for (; i < n; ++i) {
      least = x[i] < least ? x[i] : least;
      most = x[i] > most ? x[i] : most;
    }
    *lowest = least;
    *highest = most;
  }

  // A bit for each lane that is set.
  static inline __attribute__((always_inline)) uint32_t bits_of(FI lanes) {
#if TWOFOLD_VECTOR_BYTES == 64
    return _mm512_movepi32_mask((__m512i)lanes);
#elif TWOFOLD_VECTOR_BYTES == 32
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)lanes));
#else
    uint32_t bits = 0;
    for (int c = 0; c < kFloats; ++c) bits |= static_cast<uint32_t>(lanes[c] & 1 << c);
    return bits;
#endif
  }

  static int find_within(const float* x, int n, float low, float high, int32_t* places) {
    const F from = F{} + low, to = F{} + high;
    int found = 0, i = 0;
    for (; i + 2 * kFloats <= n; i += 2 * kFloats) {
      const F first = load<F>(x + i), second = load<F>(x + i + kFloats);
      uint32_t bits = bits_of((first >= from) & (first <= to));
      bits |= bits_of((second >= from) & (second <= to)) << kFloats;
      for (; bits != 0; bits &= bits - 1) places[found++] = i + __builtin_ctz(bits);
    }
    for (; i < n; ++i) {
      places[found] = i;
      found += x[i] >= low && x[i] <= high;
    }
    return found;
  }

  static double sum_exp(const float* x, int64_t n, double highest) {
    constexpr int kParts = kSumLanes / kDoubles;
    D sums[kParts] = {};
    int64_t i = 0;
    for (; i + kSumLanes <= n; i += kSumLanes) {
      for (int part = 0; part < kParts; ++part)
        sums[part] += exp2_minus(exponent(x + i + part * kDoubles, highest, kLog2E), 0.0);
    }
    if (i < n) {
      float rest[kSumLanes];
      for (int c = 0; c < kSumLanes; ++c) rest[c] = i + c < n ? x[i + c] : -__builtin_inff();
      for (int part = 0; part < kParts; ++part)
        sums[part] += exp2_minus(exponent(rest + part * kDoubles, highest, kLog2E), 0.0);
    }
    double lanes[kSumLanes];
    __builtin_memcpy(lanes, sums, sizeof lanes);
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }

  static constexpr double kPolynomial[10] = {
      // of r^1, r^2, ...
      0.6931471805599462,     0.24022650695910075,    0.05550410866465167,   0.00961812910761869,
      0.0013333558200795041,  0.00015403530424751012, 1.525267292453816e-05, 1.3215451644483806e-06,
      1.0205905476607851e-07, 7.070976083807186e-09};

  static constexpr SamplingKernels kKernels = {
      .extremes = extremes, .weigh = weigh, .tally = tally, .find_within = find_within, .sum_exp = sum_exp};
};

}  // namespace
}  // namespace twofold::kernels
