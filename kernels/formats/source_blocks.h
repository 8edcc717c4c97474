// What a source row's block holds of each integer format: GGUF's blocks (ggml-common.h) and ours. A block
// covers the same columns as the format's panel block.
//
// Every format is a struct with
//   Panel                      its panel block
//   kFlip                      what its bytes are xored with to become the panel's
//   steps(block, scratch)      its weights as the bytes of a row's steps, section after section: in place, or
//   in
//                              scratch[128]
//   plane(block, run, index)   bit 4 + index of the 32 weights of a run, where the panel has planes
//   put_scales(block, panel_block, row)   copies the scales into a panel block
//   dequantise(block, out)     the weights as float32
#pragma once
#include "panel_blocks.h"

namespace twofold::kernels {

// Bit `bit` of 32 bytes, the first byte's lowest. Multiplying gathers the lowest bits of eight bytes in the
// highest byte.
inline uint32_t bits_of(const uint8_t* bytes, int bit) {
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    const uint64_t eight = load_as<uint64_t>(bytes + 8 * i) >> bit & 0x0101010101010101u;
    bits |= static_cast<uint32_t>(eight * 0x0102040810204080u >> 56) << (8 * i);
  }
  return bits;
}

inline void copy_f16(uint8_t* to, const uint8_t* from) { std::memcpy(to, from, 2); }

template <typename PanelOfFormat, int kColumns>
struct SourceBytes {  // f16 scale, i8 q[kColumns]
  using Panel = PanelOfFormat;
  static constexpr int kBytes = 2 + kColumns;
  static constexpr uint8_t kFlip = 0x80;
  static const uint8_t* steps(const uint8_t* block, uint8_t*) { return block + 2; }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    copy_f16(Panel::scale(panel, row), block);
  }
  static void dequantise(const uint8_t* block, float* out) {
    const float scale = f16_at(block);
    for (int i = 0; i < kColumns; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
};
using SourceQ8_0 = SourceBytes<PanelQ8_0, 32>;
using SourceInt8 = SourceBytes<PanelInt8, 128>;

struct SourceQ4_0 {  // f16 scale, u8 q[16]: low nibbles are columns 0-15, high ones 16-31
  using Panel = PanelQ4_0;
  static constexpr int kBytes = 18;
  static constexpr uint8_t kFlip = 0;
  static const uint8_t* steps(const uint8_t* block, uint8_t*) { return block + 2; }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    copy_f16(Panel::scale(panel, row), block);
  }
  static void dequantise(const uint8_t* block, float* out) {
    const float scale = f16_at(block);
    for (int i = 0; i < 16; ++i) {
      out[i] = scale * static_cast<float>((block[2 + i] & 0xf) - 8);
      out[16 + i] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
    }
  }
};

struct SourceInt4 {  // f16 scale, f16 min, u8 q[32]: low nibble first
  using Panel = PanelInt4;
  static constexpr int kBytes = 36;
  static constexpr uint8_t kFlip = 0;
  static const uint8_t* steps(const uint8_t* block, uint8_t* scratch) {
    const uint8_t* q = block + 4;
    for (int i = 0; i < 16; ++i) {
      scratch[2 * i] = static_cast<uint8_t>((q[i] & 0xfu) | q[16 + i] << 4);
      scratch[2 * i + 1] = static_cast<uint8_t>(q[i] >> 4 | (q[16 + i] & 0xf0u));
    }
    return scratch;
  }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    copy_f16(Panel::scale(panel, row), block);
    copy_f16(Panel::min(panel, row), block + 2);
  }
  static void dequantise(const uint8_t* block, float* out) {
    const float scale = f16_at(block), min = f16_at(block + 2);
    for (int i = 0; i < 32; ++i) {
      out[2 * i] = scale * static_cast<float>(block[4 + i] & 0xf) + min;
      out[2 * i + 1] = scale * static_cast<float>(block[4 + i] >> 4) + min;
    }
  }
};

// The eight 6-bit scales and minima that q4_k and q5_k squeeze into 12 bytes.
inline int k_scale(const uint8_t* packed, int run) {
  return run < 4 ? packed[run] & 63 : (packed[run + 4] & 0xf) | (packed[run - 4] >> 6) << 4;
}
inline int k_min(const uint8_t* packed, int run) {
  return run < 4 ? packed[run + 4] & 63 : packed[run + 4] >> 4 | (packed[run] >> 6) << 4;
}

// f16 d, f16 dmin, u8 scales[12], q5_k only: u8 high[32], u8 q[128]: 32 bytes hold a pair of runs, low
// nibbles first; bit r of high[i] belongs to weight i of run r.
template <int Bits>
struct SourceK {
  using Panel = PanelK<Bits>;
  static constexpr int kHigh = Bits == 5 ? 32 : 0;
  static constexpr int kBytes = 144 + kHigh;
  static constexpr uint8_t kFlip = 0;
  static const uint8_t* steps(const uint8_t* block, uint8_t*) { return block + 16 + kHigh; }
  static uint32_t plane(const uint8_t* block, int run, int) { return bits_of(block + 16, run); }
  static void values(const uint8_t* block, int run, uint8_t* u) {
    const uint8_t* high = block + 16;
    const uint8_t* q = block + 16 + kHigh + run / 2 * 32;
    const int shift = run % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      unsigned value = q[i] >> shift & 0xfu;
      if constexpr (Bits == 5) value |= (high[i] >> run & 1u) << 4;
      u[i] = static_cast<uint8_t>(value);
    }
  }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    copy_f16(Panel::d(panel, row), block);
    copy_f16(Panel::dmin(panel, row), block + 2);
    for (int run = 0; run < 8; ++run) {
      Panel::scale(panel, row, run) = static_cast<uint8_t>(k_scale(block + 4, run));
      Panel::min(panel, row, run) = static_cast<uint8_t>(k_min(block + 4, run));
    }
  }
  static void dequantise(const uint8_t* block, float* out) {
    const float d = f16_at(block), dmin = f16_at(block + 2);
    for (int run = 0; run < 8; ++run) {
      const float scale = d * static_cast<float>(k_scale(block + 4, run));
      const float min = dmin * static_cast<float>(k_min(block + 4, run));
      uint8_t u[32];
      values(block, run, u);
      for (int i = 0; i < 32; ++i) out[32 * run + i] = scale * static_cast<float>(u[i]) - min;
    }
  }
};
using SourceQ4_K = SourceK<4>;
using SourceQ5_K = SourceK<5>;

// u8 low[128], u8 high[64], i8 scale[16], f16 d. Each half of 128 columns: the low nibbles of low[0..63] are
// columns 0-63, the high ones 64-127; bits 2r, 2r + 1 of high[i] belong to weight i of the half's run r.
struct SourceQ6_K {
  using Panel = PanelQ6_K;
  static constexpr int kBytes = 210;
  static constexpr uint8_t kFlip = 0;
  static const uint8_t* steps(const uint8_t* block, uint8_t* scratch) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t *first = block + 64 * half, *second = first + 32;
      uint8_t* to = scratch + 64 * half;
      for (int i = 0; i < 32; ++i) {
        to[i] = static_cast<uint8_t>((first[i] & 0xfu) | second[i] << 4);
        to[32 + i] = static_cast<uint8_t>(first[i] >> 4 | (second[i] & 0xf0u));
      }
    }
    return scratch;
  }
  static uint32_t plane(const uint8_t* block, int run, int index) {
    return bits_of(block + 128 + run / 4 * 32, run % 4 * 2 + index);
  }
  static void values(const uint8_t* block, int run, uint8_t* u) {
    const int r = run % 4;
    const uint8_t* low = block + run / 4 * 64 + r % 2 * 32;
    const uint8_t* high = block + 128 + run / 4 * 32;
    const int low_shift = r / 2 * 4, high_shift = 2 * r;
    for (int i = 0; i < 32; ++i) {
      u[i] = static_cast<uint8_t>((low[i] >> low_shift & 0xfu) | (high[i] >> high_shift & 3u) << 4);
    }
  }
  static void put_scales(const uint8_t* block, uint8_t* panel, int row) {
    copy_f16(Panel::d(panel, row), block + 208);
    for (int run16 = 0; run16 < 16; ++run16) Panel::scale(panel, row, run16) = block[192 + run16];
  }
  static void dequantise(const uint8_t* block, float* out) {
    const float d = f16_at(block + 208);
    for (int run = 0; run < 8; ++run) {
      uint8_t u[32];
      values(block, run, u);
      for (int i = 0; i < 32; ++i) {
        const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + 2 * run + i / 16]));
        out[32 * run + i] = scale * static_cast<float>(u[i] - 32);
      }
    }
  }
};

static_assert(SourceQ8_0::kBytes == layout_of(WeightFormat::kQ8_0).block_bytes);
static_assert(SourceQ4_0::kBytes == layout_of(WeightFormat::kQ4_0).block_bytes);
static_assert(SourceQ4_K::kBytes == layout_of(WeightFormat::kQ4_K).block_bytes);
static_assert(SourceQ5_K::kBytes == layout_of(WeightFormat::kQ5_K).block_bytes);
static_assert(SourceQ6_K::kBytes == layout_of(WeightFormat::kQ6_K).block_bytes);
static_assert(SourceInt8::kBytes == layout_of(WeightFormat::kInt8).block_bytes);
static_assert(SourceInt4::kBytes == layout_of(WeightFormat::kInt4).block_bytes);

}  // namespace twofold::kernels
