// NVIDIA's NVFP4: 4.5 bits a weight. A code is MXFP4's (E2M1); every 16 columns have a float of 8 bits (E4M3) for scale,
// and a tensor, as here each of its rows, an f32 that multiplies these or, negative, divides them.
//
//   source  f32 of_row; then for 64 columns u8 e4m3[4]; u8 q[32] (GGUF): of each 16 columns 8 bytes, whose low nibbles are
//           columns 0-7, high ones 8-15
//   panel   256 columns: f32 of_row[32], scaled by 2^103 as multiplier, 2^-103 as divisor; u8 scale[16][32] (of subblocks of
//           16, as float_of_8 reads them); for each pair p of subblocks of 32: 8 slices of nibbles (subblock 2p | subblock 2p + 1)
//   weight = (of_row * e4m3) * e2m1[q], each product rounded; (e4m3 / -of_row) * e2m1[q]
#pragma once
#include "mxfp4.h"

namespace twofold::kernels::formats {

// Exact in products, too: 15 bits of an integer sum times 4 of a scale, and the sum of two such is rounded once.
struct FloatScales : NoMinima {
  using Kind = PerHalf;
  using Sub = FloatBytes;
  static constexpr int kHeaderBytes = 640, kHalves = 0;

  // e4m3 as float_of_8 reads it. As GGUF defines, its sign is not looked at, and 0x7f is zero.
  static uint8_t code_of_e4m3(uint8_t byte) {
    const int magnitude = byte & 0x7f, mantissa = byte & 7;
    if (magnitude == 0 || byte == 0x7f) return 0;
    if (magnitude > 7) return static_cast<uint8_t>(magnitude + (kLeastExponent + 2) * 8);
    const int bits = mantissa > 3 ? 2 : mantissa > 1 ? 1 : 0;  // a subnormal's above its first
    return static_cast<uint8_t>((kLeastExponent + bits) * 8 + ((mantissa << (3 - bits)) & 7));
  }
  // What multiplies twice a code.
  static float exact_scale(float of_row, float e4m3) {
    return 0.5f * (of_row < 0 ? e4m3 / -of_row : of_row * e4m3);
  }
  static float source_scale(const SourceBlock& source, int subblock, int half) {
    const uint8_t byte = source.block[2 * subblock + half];
    return exact_scale(load_as<float>(source.row), byte == 0x7f ? 0.0f : float_of_e4m3(byte & 0x7fu));
  }
  static bool put_scales(const SourceBlock& source, uint8_t* panel, int subblock, int row) {
    for (int i = 0; i < 4; ++i) panel[sub_at(subblock + i / 2, i % 2) + row] = code_of_e4m3(source.block[i]);
    const float of_row = load_as<float>(source.row);
    store_as(panel + 4 * row, of_row * (of_row < 0 ? 0x1p-103f : 0x1p103f));
    return (bits_of_float(of_row) & 0x7f800000u) != 0x7f800000u;
  }
  static float exact_half_scale(const uint8_t* panel, int subblock, int half, int row) {
    const float of_row = load_as<float>(panel + 4 * row);
    return exact_scale(of_row * (of_row < 0 ? 0x1p103f : 0x1p-103f),
                       float_of_8(panel[sub_at(subblock, half) + row]) * 0x1p104f);
  }

  TWOFOLD_HD static constexpr int sub_at(int subblock, int half) { return 128 + 32 * (2 * subblock + half); }
  template <class V>
  TWOFOLD_HD static typename V::F block_scale(const uint8_t* panel, int g) {
    return V::multipliers(panel + 4 * V::kLanes * g);
  }
  template <class V>
  TWOFOLD_HD static typename V::F scale(const uint8_t* panel, int subblock, int half, int g) {
    return V::mul(block_scale<V>(panel, g), numbers_of<V, FloatScales>(panel, subblock, half, g));
  }

 private:
  static constexpr int kLeastExponent = 14;  // of 2^-9, the least e4m3
};

struct NVFP4 : Panel<256, FloatScales, 4, E2M1> {
  static constexpr const char *kName = "nvfp4", *kGguf = "";
  static constexpr int kBlockColumns = 64, kBlockBytes = 36, kRowHeadBytes = 4, kZero = 16;

  static const uint8_t* slices(const uint8_t* block, int count, uint8_t* scratch) {
    if (count < 4) std::memset(scratch, 0, kPanelColumns / 2);
    for (int i = 0; i < 2 * count; ++i) {
      const uint8_t* q = block + i / 2 * kBlockBytes + 4 + i % 2 * 8;
      const uint64_t first = load_as<uint64_t>(q), second = load_as<uint64_t>(q + 16);
      constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
      store_as(scratch + 16 * i, (first & kLow) | (second & kLow) << 4);
      store_as(scratch + 16 * i + 8, (first >> 4 & kLow) | (second & ~kLow));
    }
    return scratch;
  }
  // Unpacks one of the two subblocks of a source block.
  static void values(const uint8_t* block, int subblock, uint8_t* u) {
    for (int half = 0; half < 2; ++half) read_halves(block + 4 + 16 * subblock + 8 * half, 8, u + 16 * half);
  }
};

}  // namespace twofold::kernels::formats
