// The kernels of sampling_kernels.h, written once over vectors of TWOFOLD_VECTOR_BYTES; a file for each level
// defines that and is compiled with its own flags. Everything lives in an anonymous namespace, so no
// instantiation is shared between levels. No standard library here, for the same reason.
#pragma once
#include <cstdint>
#include <cstring>

#include "levels.h"

namespace twofold::kernels {
namespace {

struct SamplingLanes {
  static constexpr int kBytes = TWOFOLD_VECTOR_BYTES;
  static constexpr int kDoubles = kBytes / 8, kFloats = kBytes / 4;
  static constexpr int kSumLanes = 8;
  typedef double D __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef float F __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef int32_t FI __attribute__((vector_size(TWOFOLD_VECTOR_BYTES)));
  typedef float Half __attribute__((vector_size(TWOFOLD_VECTOR_BYTES / 2)));
  typedef int32_t HalfI __attribute__((vector_size(TWOFOLD_VECTOR_BYTES / 2)));

  template <class V>
  static inline __attribute__((always_inline)) V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }

  // (x - highest) * factor, at least -700: exp of that is a normal number, and too small to count.
  static inline __attribute__((always_inline)) D exponent(const float* x, double highest, double factor) {
    const D low = D{} - 700.0;
    const D y = (__builtin_convertvector(load<Half>(x), D) - highest) * factor;
    return y > low ? y : low;  // also of a NaN
  }

  // exp(y) for y in [-700, 0], within 8e-16 of it near 0 and 1e-13 far from it: 2^n * e^r with |r| <= ln 2 /
  // 2; exp(0) is 1 exactly. The polynomial meets (e^r - 1) / r at the Chebyshev nodes.
  static inline __attribute__((always_inline)) D exp(D y) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: what is added to it loses its fraction
    constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
    const D shifted = y * kLog2E + kRound;
    const D n = shifted - kRound;
    const D r = y - n * kLn2;
    D p = D{} + kPolynomial[0];
#pragma GCC unroll 16
    for (int i = 1; i < kDegree; ++i) p = p * r + kPolynomial[i];
    p = p * r + 1.0;
    return (D)((I)p + ((I)shifted << 52));
  }

  static void weigh_vector(const float* x, const WeightScale& scale, uint64_t* weight, int32_t* bucket) {
    constexpr double kWhole = 4503599627370496.0;  // 2^52: the number lies in the low bits of a sum with it
    const D y = exponent(x, scale.highest, scale.inverse_temperature);
    const I w = (I)(exp(y) * scale.one + kWhole) & ((int64_t{1} << 52) - 1);
    std::memcpy(weight, &w, sizeof w);
    const D last = D{} + scale.last_bucket;
    D b = y * -scale.per_bucket;
    b = b < last ? b : last;
    const HalfI whole = __builtin_convertvector(b, HalfI);
    std::memcpy(bucket, &whole, sizeof whole);
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
    float least = kInfinity, most = -kInfinity;
    for (int part = 0; part < 2; ++part) {
      for (int c = 0; c < kFloats; ++c) {
        least = low[part][c] < least ? low[part][c] : least;
        most = high[part][c] > most ? high[part][c] : most;
      }
    }
    for (; i < n; ++i) {
      least = x[i] < least ? x[i] : least;
      most = x[i] > most ? x[i] : most;
    }
    *lowest = least;
    *highest = most;
  }

  static int find_within(const float* x, int n, float low, float high, int32_t* places) {
    constexpr int kStretch = 8 * kFloats;
    const F from = F{} + low, to = F{} + high;
    int found = 0;
    for (int i = 0; i < n; i += kStretch) {
      const int end = i + kStretch < n ? i + kStretch : n;
      if (end - i == kStretch) {
        FI within = {};
        for (int part = 0; part < 8; ++part) {
          const F v = load<F>(x + i + part * kFloats);
          within |= (v >= from) & (v <= to);
        }
        const I words = (I)within;
        int64_t any = 0;
        for (int c = 0; c < kDoubles; ++c) any |= words[c];
        if (any == 0) continue;
      }
      for (int at = i; at < end; ++at) {
        places[found] = at;
        found += x[at] >= low && x[at] <= high;
      }
    }
    return found;
  }

  static double sum_exp(const float* x, int64_t n, double highest) {
    constexpr int kParts = kSumLanes / kDoubles;
    D sums[kParts] = {};
    int64_t i = 0;
    for (; i + kSumLanes <= n; i += kSumLanes) {
      for (int part = 0; part < kParts; ++part)
        sums[part] += exp(exponent(x + i + part * kDoubles, highest, 1.0));
    }
    if (i < n) {
      float rest[kSumLanes];
      for (int c = 0; c < kSumLanes; ++c) rest[c] = i + c < n ? x[i + c] : -__builtin_inff();
      for (int part = 0; part < kParts; ++part)
        sums[part] += exp(exponent(rest + part * kDoubles, highest, 1.0));
    }
    double lanes[kSumLanes];
    std::memcpy(lanes, sums, sizeof lanes);
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }

  static constexpr int kDegree = 10;
  static constexpr double kPolynomial[kDegree] = {
      2.7620088445409746e-07, 2.763265575933203e-06, 2.4801521295954376e-05, 0.0001984119061583585,
      0.0013888888917213717,  0.008333333367332009,  0.04166666666662413,    0.16666666666615607,
      0.5000000000000001,     1.0000000000000013};

  static constexpr SamplingKernels kKernels = {
      .extremes = extremes, .weigh = weigh, .find_within = find_within, .sum_exp = sum_exp};
  static constexpr KernelTable part() {
    KernelTable table;
    table.sampling = &kKernels;
    return table;
  }
};

}  // namespace
}  // namespace twofold::kernels
