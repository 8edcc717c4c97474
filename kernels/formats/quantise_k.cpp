// Blocks of 256 weights whose subblocks have small integer scales under a common float one (GGUF's K types).
//
// Each subblock is fitted alone first. Then the common scales are chosen, the subblocks' scales rounded to them, and
// from there on only what can be stored is compared: neighbouring integers for each subblock, and once more the
// common scales for the integers that came out.
#include <algorithm>
#include <cstring>

#include "quantise.h"

namespace twofold::kernels {
namespace {

constexpr int kBlock = 256;

// ---- q4_k, q5_k: weight = d * scale * q - dmin * min, scale and min of 6 bits for each subblock of 32 ----

struct AffineBlock {
  uint16_t d, dmin;
  int scale[8], min[8];
  uint8_t q[kBlock];
};

// Fills scale, min and q for the stored d and dmin, near the wanted scales; returns the block's error.
float choose_runs(const float* x, const float* w, const Affine* wanted, int highest, AffineBlock& block) {
  const float d = float_of_f16(block.d), dmin = float_of_f16(block.dmin), top = static_cast<float>(highest);
  float total = 0.0f;
  for (int subblock = 0; subblock < 8; ++subblock) {
    const float *xs = x + 32 * subblock, *ws = w + 32 * subblock;
    const int scale0 =
        static_cast<int>(nearest_within(wanted[subblock].scale * inverse_or_zero(d), 0.0f, 63.0f));
    const int min0 =
        static_cast<int>(nearest_within(-wanted[subblock].min * inverse_or_zero(dmin), 0.0f, 63.0f));
    float best = INFINITY;
    for (int scale = std::clamp(scale0 - 1, 0, 63); scale <= std::clamp(scale0 + 1, 0, 63); ++scale) {
      for (int min = std::clamp(min0 - 1, 0, 63); min <= std::clamp(min0 + 1, 0, 63); ++min) {
        const Affine tried{d * static_cast<float>(scale), -dmin * static_cast<float>(min)};
        const float error = try_affine(xs, ws, 32, tried, top, true).error;
        if (error < best) {
          best = error;
          block.scale[subblock] = scale;
          block.min[subblock] = min;
        }
      }
    }
    total += best;
    const float inverse = inverse_or_zero(d * static_cast<float>(block.scale[subblock]));
    const float offset = dmin * static_cast<float>(block.min[subblock]);
    for (int i = 0; i < 32; ++i) {
      block.q[32 * subblock + i] =
          static_cast<uint8_t>(nearest_within((xs[i] + offset) * inverse, 0.0f, top));
    }
  }
  return total;
}

// The d and dmin that fit the integers of `block` best.
void refit_common(const float* x, const float* w, const AffineBlock& block, float* d, float* dmin) {
  double aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;
  for (int i = 0; i < kBlock; ++i) {
    const double a = block.scale[i / 32] * block.q[i], b = -block.min[i / 32], weight = w[i];
    aa += weight * a * a;
    ab += weight * a * b;
    bb += weight * b * b;
    ax += weight * a * x[i];
    bx += weight * b * x[i];
  }
  const double determinant = aa * bb - ab * ab;
  if (determinant > 1e-9 * aa * bb) {
    *d = static_cast<float>((ax * bb - bx * ab) / determinant);
    *dmin = static_cast<float>((bx * aa - ax * ab) / determinant);
  } else if (aa > 0) {
    *d = static_cast<float>(ax / aa);
  }
}

AffineBlock fit_affine_block(const float* x, const float* w, int highest) {
  Affine wanted[8];
  float max_scale = 0.0f, max_min = 0.0f;
  for (int subblock = 0; subblock < 8; ++subblock) {
    wanted[subblock] = fit_affine(x + 32 * subblock, w + 32 * subblock, 32, highest, true);
    max_scale = wanted[subblock].scale > max_scale ? wanted[subblock].scale : max_scale;
    max_min = -wanted[subblock].min > max_min ? -wanted[subblock].min : max_min;
  }
  AffineBlock best;
  best.d = stored_f16(max_scale / 63.0f);
  best.dmin = stored_f16(max_min / 63.0f);
  float best_error = choose_runs(x, w, wanted, highest, best);
  for (int pass = 0; pass < 2; ++pass) {
    float d = float_of_f16(best.d), dmin = float_of_f16(best.dmin);
    refit_common(x, w, best, &d, &dmin);
    if (!(d >= 0.0f) || !(dmin >= 0.0f)) break;
    AffineBlock next;
    next.d = stored_f16(d);
    next.dmin = stored_f16(dmin);
    const float error = choose_runs(x, w, wanted, highest, next);
    if (!(error < best_error)) break;
    best_error = error;
    best = next;
  }
  return best;
}

// The head that q4_k and q5_k share: d, dmin, and 8 scales and 8 minima of 6 bits in 12 bytes.
void put_affine_head(const AffineBlock& from, uint8_t* block) {
  std::memcpy(block, &from.d, 2);
  std::memcpy(block + 2, &from.dmin, 2);
  uint8_t* packed = block + 4;
  for (int subblock = 0; subblock < 4; ++subblock) {
    const int high_scale = from.scale[subblock + 4], high_min = from.min[subblock + 4];
    packed[subblock] = static_cast<uint8_t>(from.scale[subblock] | high_scale >> 4 << 6);
    packed[subblock + 4] = static_cast<uint8_t>(from.min[subblock] | high_min >> 4 << 6);
    packed[subblock + 8] = static_cast<uint8_t>((high_scale & 0xf) | (high_min & 0xf) << 4);
  }
}

void put_nibbles(const AffineBlock& from, uint8_t* q) {
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* subblock = from.q + 64 * pair;
    for (int i = 0; i < 32; ++i)
      q[32 * pair + i] = static_cast<uint8_t>((subblock[i] & 0xf) | (subblock[32 + i] & 0xf) << 4);
  }
}

// ---- q6_k: weight = d * scale * (q - 32), scale a signed byte for each subblock of 16 ----

struct ScaledBlock {
  uint16_t d;
  int scale[16];
  uint8_t q[kBlock];
};

float choose_scales(const float* x, const float* w, const float* wanted, ScaledBlock& block) {
  const float d = float_of_f16(block.d);
  float total = 0.0f;
  for (int subblock = 0; subblock < 16; ++subblock) {
    const float *xs = x + 16 * subblock, *ws = w + 16 * subblock;
    const int scale0 =
        static_cast<int>(nearest_within(wanted[subblock] * inverse_or_zero(d), -128.0f, 127.0f));
    float best = INFINITY;
    for (int scale = std::clamp(scale0 - 1, -128, 127); scale <= std::clamp(scale0 + 1, -128, 127); ++scale) {
      const float error = try_scale(xs, ws, 16, d * static_cast<float>(scale), -32.0f, 31.0f).error;
      if (error < best) {
        best = error;
        block.scale[subblock] = scale;
      }
    }
    total += best;
    const float inverse = inverse_or_zero(d * static_cast<float>(block.scale[subblock]));
    for (int i = 0; i < 16; ++i) {
      block.q[16 * subblock + i] =
          static_cast<uint8_t>(nearest_within(xs[i] * inverse, -32.0f, 31.0f) + 32.0f);
    }
  }
  return total;
}

ScaledBlock fit_scaled_block(const float* x, const float* w) {
  float wanted[16], extreme = 0.0f;
  for (int subblock = 0; subblock < 16; ++subblock) {
    wanted[subblock] = fit_scale(x + 16 * subblock, w + 16 * subblock, 16, 32);
    if (std::fabs(wanted[subblock]) > std::fabs(extreme)) extreme = wanted[subblock];
  }
  ScaledBlock best;
  best.d = stored_f16(extreme / -128.0f);
  float best_error = choose_scales(x, w, wanted, best);
  for (int pass = 0; pass < 2; ++pass) {
    double aa = 0, ax = 0;
    for (int i = 0; i < kBlock; ++i) {
      const double a = best.scale[i / 16] * (best.q[i] - 32);
      aa += w[i] * a * a;
      ax += w[i] * a * x[i];
    }
    if (!(aa > 0)) break;
    ScaledBlock next;
    next.d = stored_f16(static_cast<float>(ax / aa));
    const float error = choose_scales(x, w, wanted, next);
    if (!(error < best_error)) break;
    best_error = error;
    best = next;
  }
  return best;
}

}  // namespace

void formats::Q4_K::quantise(const float* x, const float* w, uint8_t* block) {
  const AffineBlock best = fitted<fit_affine_block>(x, w, 15);
  put_affine_head(best, block);
  put_nibbles(best, block + 16);
}

void formats::Q5_K::quantise(const float* x, const float* w, uint8_t* block) {
  const AffineBlock best = fitted<fit_affine_block>(x, w, 31);
  put_affine_head(best, block);
  for (int i = 0; i < 32; ++i) {
    int high = 0;
    for (int subblock = 0; subblock < 8; ++subblock) high |= best.q[32 * subblock + i] >> 4 << subblock;
    block[16 + i] = static_cast<uint8_t>(high);
  }
  put_nibbles(best, block + 48);
}

void formats::Q6_K::quantise(const float* x, const float* w, uint8_t* block) {
  const ScaledBlock best = fitted<fit_scaled_block>(x, w);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* q = best.q + 128 * half;
    for (int i = 0; i < 64; ++i) {
      block[64 * half + i] = static_cast<uint8_t>((q[i] & 0xf) | (q[64 + i] & 0xf) << 4);
    }
    for (int i = 0; i < 32; ++i) {
      block[128 + 32 * half + i] =
          static_cast<uint8_t>(q[i] >> 4 | q[32 + i] >> 4 << 2 | q[64 + i] >> 4 << 4 | q[96 + i] >> 4 << 6);
    }
  }
  for (int subblock = 0; subblock < 16; ++subblock)
    block[192 + subblock] = static_cast<uint8_t>(best.scale[subblock]);
  std::memcpy(block + 208, &best.d, 2);
}

}  // namespace twofold::kernels
