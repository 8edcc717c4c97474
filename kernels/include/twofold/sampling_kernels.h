// What sampling asks of a row of logits as long as a vocabulary. The results are the same bits on every
// level: the same operations on every element, none of them fused, and sums over eight lanes whatever the
// vectors hold. A NaN counts as minus infinity.
#pragma once
#include <cstdint>

namespace twofold::kernels {

// A softmax in whole numbers: an element x weighs round(2^bits * exp((x - highest) * inverse_temperature)).
// Sums of whole numbers are exact, so neither threads nor the order of additions can change the picked token.
struct WeightScale {
  double highest;
  double factor;      // inverse_temperature / ln 2
  double bits;        // a whole number, at most 51: the largest element weighs 2^bits
  double per_bucket;  // buckets per unit of (highest - x) * factor
  double last_bucket;
};

struct SamplingKernels {
  // The lowest and highest of n elements: infinity and -infinity of none.
  void (*extremes)(const float* x, int64_t n, float* lowest, float* highest);

  // The weight of each element and its bucket, which never falls as x falls; bucket is at most last_bucket.
  void (*weigh)(const float* x, int n, const WeightScale& scale, uint64_t* weight, int32_t* bucket);

  // Adds each element's weight to its bucket's mass, and 1 to its count unless count is null.
  void (*tally)(const float* x, int64_t n, const WeightScale& scale, uint64_t* mass, uint32_t* count);

  // The places of elements within [low, high], ascending, as many as n in `places`; returns their number.
  int (*find_within)(const float* x, int n, float low, float high, int32_t* places);

  // Sum of exp(x - highest); no x is above highest.
  double (*sum_exp)(const float* x, int64_t n, double highest);
};

}  // namespace twofold::kernels
