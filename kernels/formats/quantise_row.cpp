// Source rows from float32: plain elements, and the formats whose blocks stand alone. K types:
// quantise_k.cpp.
#include <cstring>

#include "quantise.h"

namespace twofold::kernels {
namespace {

constexpr int kMaxBlock = 256;

// Largest magnitude -> 127; the integers are rounded with the scale as it is stored.
template <int Columns>
void quantise_8bit(const float* x, uint8_t* block) {
  float amax = 0.0f;
  for (int i = 0; i < Columns; ++i) {
    const float magnitude = std::fabs(x[i]);
    amax = magnitude > amax ? magnitude : amax;
  }
  const uint16_t scale = stored_f16(amax / 127.0f);
  const float inverse = inverse_or_zero(float_of_f16(scale));
  std::memcpy(block, &scale, 2);
  for (int i = 0; i < Columns; ++i) {
    block[2 + i] = static_cast<uint8_t>(static_cast<int>(nearest_within(x[i] * inverse, -127.0f, 127.0f)));
  }
}

void quantise_q4_0(const float* x, const float* w, uint8_t* block) {
  const uint16_t scale = stored_f16(fitted<fit_scale>(x, w, 32, 8));
  const float inverse = inverse_or_zero(float_of_f16(scale));
  std::memcpy(block, &scale, 2);
  const auto nibble = [=](int i) {
    return static_cast<int>(nearest_within(x[i] * inverse, -8.0f, 7.0f)) + 8;
  };
  for (int i = 0; i < 16; ++i) block[2 + i] = static_cast<uint8_t>(nibble(i) | nibble(16 + i) << 4);
}

void quantise_int4(const float* x, const float* w, uint8_t* block) {
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

// Calls quantise(x, weights, block) for every block of the row; weights are 1 where no importance is given.
template <class Quantise>
void for_each_block(WeightFormat format, const float* x, const float* importance, int64_t columns, void* row,
                    const Quantise& quantise) {
  const FormatLayout& layout = layout_of(format);
  float ones[kMaxBlock];
  for (float& one : ones) one = 1.0f;
  uint8_t* block = static_cast<uint8_t*>(row);
  for (int64_t k = 0; k < columns; k += layout.block_columns, block += layout.block_bytes) {
    quantise(x + k, importance == nullptr ? ones : importance + k, block);
  }
}

}  // namespace

void quantise_row(WeightFormat format, const float* x, const float* importance, int64_t columns, void* row) {
  uint8_t* bytes = static_cast<uint8_t*>(row);
  const auto blocks = [&](const auto& quantise) {
    for_each_block(format, x, importance, columns, row, quantise);
  };
  switch (format) {
    case WeightFormat::kF32:
      std::memcpy(row, x, static_cast<size_t>(4 * columns));
      return;
    case WeightFormat::kF16:
      for (int64_t k = 0; k < columns; ++k) {
        const uint16_t bits = f16_of_float(x[k]);
        std::memcpy(bytes + 2 * k, &bits, 2);
      }
      return;
    case WeightFormat::kBF16:
      for (int64_t k = 0; k < columns; ++k) {
        const uint16_t bits = bf16_of_float(x[k]);
        std::memcpy(bytes + 2 * k, &bits, 2);
      }
      return;
    case WeightFormat::kFP8:
      return;  // made by checkpoints' authors only: its scales lie outside the row
    case WeightFormat::kQ8_0:
      return blocks([](const float* b, const float*, uint8_t* out) { quantise_8bit<32>(b, out); });
    case WeightFormat::kInt8:
      return blocks([](const float* b, const float*, uint8_t* out) { quantise_8bit<128>(b, out); });
    case WeightFormat::kQ4_0:
      return blocks(quantise_q4_0);
    case WeightFormat::kInt4:
      return blocks(quantise_int4);
    case WeightFormat::kQ4_K:
      return blocks(quantise_q4_k);
    case WeightFormat::kQ5_K:
      return blocks(quantise_q5_k);
    case WeightFormat::kQ6_K:
      return blocks(quantise_q6_k);
  }
}

}  // namespace twofold::kernels
