// Source rows from float32, and the quantisers of formats whose blocks have one scale. K types:
// quantise_k.cpp.
#include <cstring>
#include <limits>
#include <vector>

#include "quantise.h"

namespace twofold::kernels {
namespace {

constexpr int kMaxBlock = 256;

// Largest magnitude -> 127; the integers are rounded with the scale as it is stored, which precedes them.
void quantise_8bit(const float* x, int64_t columns, uint8_t* to) {
  float amax = 0.0f;
  for (int64_t i = 0; i < columns; ++i) {
    const float magnitude = std::fabs(x[i]);
    amax = magnitude > amax ? magnitude : amax;
  }
  const uint16_t scale = stored_f16(amax / 127.0f);
  const float inverse = inverse_or_zero(float_of_f16(scale));
  std::memcpy(to, &scale, 2);
  for (int64_t i = 0; i < columns; ++i) {
    to[2 + i] = static_cast<uint8_t>(static_cast<int>(nearest_within(x[i] * inverse, -127.0f, 127.0f)));
  }
}

// 32 weights in nibbles.
void put_q4_0(const float* x, float inverse, uint8_t* q) {
  const auto nibble = [=](int i) {
    return static_cast<int>(nearest_within(x[i] * inverse, -8.0f, 7.0f)) + 8;
  };
  for (int i = 0; i < 16; ++i) q[i] = static_cast<uint8_t>(nibble(i) | nibble(16 + i) << 4);
}

// The nearest of 0, 1, 2, 3, 4, 6, 8, 12 to a magnitude, ties to the even code: what E2M1 is twice of.
int code_of(float twice) {
  const float magnitude = std::fabs(twice);
  // Halfway between neighbours; an odd code begins above it.
  constexpr float kRoundsUpFrom[] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
  int code = 0;
  for (int c = 0; c < 7; ++c)
    code += c % 2 == 0 ? magnitude > kRoundsUpFrom[c] : magnitude >= kRoundsUpFrom[c];
  return std::signbit(twice) && code > 0 ? code + 8 : code;
}

}  // namespace

void formats::F16::quantise(const float* x, const float*, uint8_t* block) {
  store_as(block, f16_of_float(*x));
}

void formats::Q8_0::quantise(const float* x, const float*, uint8_t* block) { quantise_8bit(x, 32, block); }

void formats::Int8::quantise(const float* x, const float*, uint8_t* block) { quantise_8bit(x, 128, block); }

void formats::Int8_Channel::quantise_row(const float* x, const float*, int64_t columns, uint8_t* row) {
  quantise_8bit(x, columns, row);
}

void formats::Int4_Channel::quantise_row(const float* x, const float* w, int64_t columns, uint8_t* row) {
  const std::vector<float> ones(w == nullptr ? static_cast<size_t>(columns) : 0, 1.0f);
  const float fit = fitted<fit_row_scale>(x, w == nullptr ? ones.data() : w, static_cast<int>(columns));
  const uint16_t scale = stored_f16(fit);
  const float inverse = inverse_or_zero(float_of_f16(scale));
  std::memcpy(row, &scale, 2);
  row += kRowHeadBytes;
  for (int64_t k = 0; k < columns; k += kBlockColumns, row += kBlockBytes) put_q4_0(x + k, inverse, row);
}

void formats::Q4_0::quantise(const float* x, const float* w, uint8_t* block) {
  const uint16_t scale = stored_f16(fitted<fit_scale>(x, w, 32, 8));
  const float inverse = inverse_or_zero(float_of_f16(scale));
  std::memcpy(block, &scale, 2);
  put_q4_0(x, inverse, block + 2);
}

void formats::Int4::quantise(const float* x, const float* w, uint8_t* block) {
  const Affine best = fitted<fit_affine>(x, w, 64, 15, false);
  const uint16_t scale = stored_f16(best.scale), min = stored_f16(best.min);
  const float inverse = inverse_or_zero(float_of_f16(scale)), offset = float_of_f16(min);
  std::memcpy(block, &scale, 2);
  std::memcpy(block + 2, &min, 2);
  const auto nibble = [=](int i) {
    return static_cast<int>(nearest_within((x[i] - offset) * inverse, 0.0f, 15.0f));
  };
  for (int i = 0; i < 32; ++i) block[4 + i] = static_cast<uint8_t>(nibble(2 * i) | nibble(2 * i + 1) << 4);
}

// The largest weight becomes 4 to 6 times a power of two, or 3 to 4 times the next, or is cut below half of it: whichever
// leaves the smallest error.
void formats::MXFP4::quantise(const float* x, const float* w, uint8_t* block) {
  float amax = 0.0f;
  for (int i = 0; i < 32; ++i) amax = std::fabs(x[i]) > amax ? std::fabs(x[i]) : amax;
  std::memset(block, 0, kBlockBytes);
  if (!(amax > 0.0f)) return;
  if (!(amax < INFINITY)) amax = std::numeric_limits<float>::max();
  const int fits = std::ilogb(amax) - 2 + 127;
  float best = INFINITY;
  for (int e = fits - 1; e <= fits + 1; ++e) {
    const int exponent = e < 0 ? 0 : e > 254 ? 254 : e;
    const float scale = half_of_e8m0(static_cast<uint32_t>(exponent));
    uint8_t codes[32];
    float error = 0.0f;
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<uint8_t>(code_of(x[i] / scale));
      const float d = x[i] - scale * static_cast<float>(kTable[codes[i]] - kZero);
      error += w[i] * d * d;
    }
    if (!(error < best)) continue;
    best = error;
    block[0] = static_cast<uint8_t>(exponent);
    for (int i = 0; i < 16; ++i) block[1 + i] = static_cast<uint8_t>(codes[i] | codes[16 + i] << 4);
  }
}

void quantise_row(WeightFormat format, const float* x, const float* importance, int64_t columns, void* row) {
  float ones[kMaxBlock];  // the weights where no importance is given
  for (float& one : ones) one = 1.0f;
  uint8_t* block = static_cast<uint8_t*>(row);
  with_format(format, [&]<class Format>(Format) {
    if constexpr (is_per_channel<Format>) {
      Format::quantise_row(x, importance, columns, block);
    } else if constexpr (is_quantised<Format>) {
      static_assert(Format::kBlockColumns <= kMaxBlock);
      for (int64_t k = 0; k < columns; k += Format::kBlockColumns, block += Format::kBlockBytes) {
        Format::quantise(x + k, importance == nullptr ? ones : importance + k, block);
      }
    }
  });
}

}  // namespace twofold::kernels
