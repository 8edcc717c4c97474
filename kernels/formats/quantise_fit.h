// The scale (and minimum) that represents a few weights best: the smallest weighted sum of squared errors.
//
// Both searches try a row of starting scales, each a little wider or narrower than the weights' range; for
// each the weights are rounded, and the scale that fits those integers best is the least-squares solution.
// Sums are kept in eight lanes: a vector where the CPU has such long ones, else two or eight of its own, in
// the same order.
#pragma once
#include <cmath>
#include <cstring>

namespace twofold::kernels {

// fit(arguments...), compiled once more for AVX2 and with everything in it inlined, for CPUs that have that:
// four times as fast. Nothing is contracted or reordered, so the result is the same.
#if defined(__x86_64__)
template <auto fit, class... Arguments>
__attribute__((target("avx2"), flatten)) auto fitted_by_avx2(Arguments... arguments) {
  return fit(arguments...);
}
#endif
template <auto fit, class... Arguments>
auto fitted(Arguments... arguments) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return fitted_by_avx2<fit>(arguments...);
#endif
  return fit(arguments...);
}

struct Affine {  // weight = scale * q + min
  float scale, min;
};

// The nearest integer (ties to even) within [lowest, highest].
inline float nearest_within(float v, float lowest, float highest) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits
  v = v > lowest ? v : lowest;
  v = v < highest ? v : highest;
  return (v + kShift) - kShift;
}

inline constexpr int kLanes = 8;
// Handed on by reference only: how it is passed by value differs between CPUs.
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
inline void load(const float* p, Lanes& v) { std::memcpy(&v, p, sizeof v); }
// nearest_within for every lane.
inline void round_within(Lanes& v, float lowest, float highest) {
  constexpr float kShift = 12582912.0f;
  const Lanes low = Lanes{} + lowest, high = Lanes{} + highest;
  v = v > low ? v : low;
  v = v < high ? v : high;
  v = (v + kShift) - kShift;
}

// By how many steps the range of a starting scale differs from the weights'. 21 starts instead of these 6
// lower the error by 0.1 to 0.5 % and take three times as long.
inline constexpr float kStarts[] = {-1.0f, -0.6f, -0.2f, 0.2f, 0.6f, 1.0f};

// Sums over n (a multiple of 8) of what `add(i, lanes)` adds to the lanes for weights i to i + 7.
template <int Count, class Add>
inline void sum_lanes(int n, float (&sums)[Count], const Add& add) {
  Lanes lanes[Count] = {};
  for (int i = 0; i < n; i += kLanes) add(i, lanes);
  for (int s = 0; s < Count; ++s) {
    sums[s] = ((lanes[s][0] + lanes[s][4]) + (lanes[s][1] + lanes[s][5])) +
              ((lanes[s][2] + lanes[s][6]) + (lanes[s][3] + lanes[s][7]));
  }
}

inline float inverse_or_zero(float v) {
  const float inverse = 1.0f / v;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// The error of rounding with a scale, and what the best one for the resulting integers would be.
template <class Scale>
struct Fit {
  float error;
  Scale refitted;
};

// The scale of least error among those that begin(wider) gives for all starts and their refits; try_one(scale) is a Fit.
template <class Scale, int Count, class Begin, class Try>
inline Scale best_fit(const float (&starts)[Count], int passes, Scale best, const Begin& begin,
                      const Try& try_one) {
  float best_error = INFINITY;
  for (const float wider : starts) {
    Scale scale = begin(wider);
    for (int pass = 0; pass < passes; ++pass) {
      const Fit<Scale> fit = try_one(scale);
      if (fit.error < best_error) {
        best_error = fit.error;
        best = scale;
      }
      scale = fit.refitted;
    }
  }
  return best;
}

// For scale * q with q in [lowest, highest].
inline Fit<float> try_scale(const float* x, const float* w, int n, float scale, float lowest, float highest) {
  const float inverse = inverse_or_zero(scale);
  float sums[3];
  sum_lanes(n, sums, [=](int i, Lanes* lanes) {
    Lanes xs, ws;
    load(x + i, xs);
    load(w + i, ws);
    Lanes q = xs * inverse;
    round_within(q, lowest, highest);
    const Lanes d = xs - scale * q;
    lanes[0] += ws * d * d;
    lanes[1] += ws * xs * q;
    lanes[2] += ws * q * q;
  });
  return {sums[0], sums[2] > 0.0f ? sums[1] / sums[2] : 0.0f};
}

// The best scale for q in [-half, half - 1]; negative where the largest weight is positive, as -half reaches
// further. `starts` as kStarts.
template <int Count>
float fit_scale_from(const float (&starts)[Count], const float* x, const float* w, int n, int half) {
  float extreme = 0.0f;
  for (int i = 0; i < n; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  if (extreme == 0.0f) return 0.0f;
  const float lowest = static_cast<float>(-half), highest = static_cast<float>(half - 1);
  return best_fit(
      starts, 2, 0.0f, [=](float wider) { return extreme / (lowest - wider); },
      [=](float scale) { return try_scale(x, w, n, scale, lowest, highest); });
}
inline float fit_scale(const float* x, const float* w, int n, int half) {
  return fit_scale_from(kStarts, x, w, n, half);
}

// The same for a whole row of 4 bits, whose largest weights are worth cutting.
inline float fit_row_scale(const float* x, const float* w, int n) {
  constexpr float kRowStarts[] = {-1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f};
  return fit_scale_from(kRowStarts, x, w, n, 8);
}

// As try_scale, for scale * q + min with q in [0, highest]; `min_below_zero` keeps the refitted minimum <= 0.
inline Fit<Affine> try_affine(const float* x, const float* w, int n, Affine affine, float highest,
                              bool min_below_zero) {
  const float inverse = inverse_or_zero(affine.scale);
  float sums[6];
  sum_lanes(n, sums, [=](int i, Lanes* lanes) {
    Lanes xs, ws;
    load(x + i, xs);
    load(w + i, ws);
    Lanes q = (xs - affine.min) * inverse;
    round_within(q, 0.0f, highest);
    const Lanes d = xs - (affine.scale * q + affine.min);
    lanes[0] += ws * d * d;
    lanes[1] += ws;
    lanes[2] += ws * q;
    lanes[3] += ws * q * q;
    lanes[4] += ws * xs;
    lanes[5] += ws * xs * q;
  });
  const auto [error, sw, sq, sqq, sx, sxq] = sums;
  const float determinant = sw * sqq - sq * sq;
  Affine refitted = affine;
  if (determinant > 0.0f)
    refitted = {(sw * sxq - sx * sq) / determinant, (sqq * sx - sq * sxq) / determinant};
  if (min_below_zero && refitted.min > 0.0f) refitted = {sqq > 0.0f ? sxq / sqq : 0.0f, 0.0f};
  if (!(refitted.scale >= 0.0f)) refitted = affine;
  return {error, refitted};
}

// The best scale >= 0 and minimum for q in [0, highest].
inline Affine fit_affine(const float* x, const float* w, int n, int highest, bool min_below_zero) {
  float low = x[0], high = x[0];
  for (int i = 1; i < n; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  if (min_below_zero) {
    low = low < 0.0f ? low : 0.0f;
    high = high > 0.0f ? high : 0.0f;
  }
  if (!(high > low)) return {0.0f, low};
  const float top = static_cast<float>(highest);
  return best_fit(
      kStarts, 3, Affine{0.0f, low}, [=](float wider) { return Affine{(high - low) / (top + wider), low}; },
      [=](Affine affine) { return try_affine(x, w, n, affine, top, min_below_zero); });
}

}  // namespace twofold::kernels
