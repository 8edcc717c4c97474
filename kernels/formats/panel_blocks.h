// What a panel block of each integer format holds (weight_format.h), row by row: the one place that knows the
// layout, for packing, unpacking and the scalar kernels.
//
// Every format is a struct with
//   kColumns, kBytes    of a panel block
//   kOffset             what was added to make its weights unsigned
//   values(block, row, run, u)   the 32 stored (unsigned) weights of a row in run `run` of 32 columns
//   kSections           stretches of kSectionSteps steps, the first at kFirstSection, kSectionBytes apart
// and accessors of its scales and of the planes of single bits.
#pragma once
#include "elements.h"
#include "twofold/weight_format.h"

namespace twofold::kernels {

inline constexpr int kStepBytes = 4 * kPanelRows;
inline constexpr int kRunColumns = 32;
inline constexpr int kPlaneBytes = kStepBytes;  // of one run's extra bits: 8 steps of 16 bytes

// 32 bytes of a row in 8 steps.
inline void read_steps(const uint8_t* steps, int row, uint8_t* u) {
  for (int s = 0; s < 8; ++s) std::memcpy(u + 4 * s, steps + s * kStepBytes + 4 * row, 4);
}

// The low (half 0) or high (half 1) nibbles of a row in `count / 4` steps.
inline void read_nibbles(const uint8_t* steps, int row, int half, int count, uint8_t* u) {
  for (int i = 0; i < count; ++i) {
    u[i] = steps[i / 4 * kStepBytes + 4 * row + i % 4] >> (4 * half) & 0xfu;
  }
}

// Bit `bit` of each of a row's 32 weights, in a plane.
inline void or_from_plane(const uint8_t* plane, int row, int bit, uint8_t* u) {
  for (int s = 0; s < 8; ++s) {
    const unsigned four = plane[16 * s + row / 2] >> (row % 2 * 4);
    for (int j = 0; j < 4; ++j) u[4 * s + j] = static_cast<uint8_t>(u[4 * s + j] | (four >> j & 1u) << bit);
  }
}

struct PanelQ8_0 {
  static constexpr int kColumns = 32, kBytes = 1088, kOffset = 128;
  static constexpr int kSections = 1, kSectionSteps = 8, kFirstSection = 64, kSectionBytes = 0;
  static uint8_t* scale(uint8_t* block, int row) { return block + 2 * row; }
  static float scale(const uint8_t* block, int row) { return f16_at(block + 2 * row); }
  static void values(const uint8_t* block, int row, int, uint8_t* u) { read_steps(block + 64, row, u); }
};

struct PanelInt8 {
  static constexpr int kColumns = 128, kBytes = 4160, kOffset = 128;
  static constexpr int kSections = 1, kSectionSteps = 32, kFirstSection = 64, kSectionBytes = 0;
  static uint8_t* scale(uint8_t* block, int row) { return block + 2 * row; }
  static float scale(const uint8_t* block, int row) { return f16_at(block + 2 * row); }
  static void values(const uint8_t* block, int row, int run, uint8_t* u) {
    read_steps(block + 64 + run * 8 * kStepBytes, row, u);
  }
};

struct PanelQ4_0 {
  static constexpr int kColumns = 32, kBytes = 576, kOffset = 8;
  static constexpr int kSections = 1, kSectionSteps = 4, kFirstSection = 64, kSectionBytes = 0;
  static uint8_t* scale(uint8_t* block, int row) { return block + 2 * row; }
  static float scale(const uint8_t* block, int row) { return f16_at(block + 2 * row); }
  static void values(const uint8_t* block, int row, int, uint8_t* u) {
    read_nibbles(block + 64, row, 0, 16, u);
    read_nibbles(block + 64, row, 1, 16, u + 16);
  }
};

struct PanelInt4 {
  static constexpr int kColumns = 64, kBytes = 1152, kOffset = 0;
  static constexpr int kSections = 1, kSectionSteps = 8, kFirstSection = 128, kSectionBytes = 0;
  static uint8_t* scale(uint8_t* block, int row) { return block + 2 * row; }
  static uint8_t* min(uint8_t* block, int row) { return block + 64 + 2 * row; }
  static float scale(const uint8_t* block, int row) { return f16_at(block + 2 * row); }
  static float min(const uint8_t* block, int row) { return f16_at(block + 64 + 2 * row); }
  static void values(const uint8_t* block, int row, int run, uint8_t* u) {
    read_nibbles(block + 128, row, run, 32, u);
  }
};

// q4_k and q5_k: d and dmin, 8 scales and minima of each row, then pairs of runs.
template <int Bits>
struct PanelK {
  static constexpr int kPlanes = Bits - 4;  // of each run
  static constexpr int kPairBytes = 2 * kPlanes * kPlaneBytes + 8 * kStepBytes;
  static constexpr int kColumns = 256, kBytes = 640 + 4 * kPairBytes, kOffset = 0;
  static constexpr int kSections = 4, kSectionSteps = 8, kFirstSection = 640 + 2 * kPlanes * kPlaneBytes,
                       kSectionBytes = kPairBytes;

  static uint8_t* d(uint8_t* block, int row) { return block + 2 * row; }
  static uint8_t* dmin(uint8_t* block, int row) { return block + 64 + 2 * row; }
  static uint8_t& scale(uint8_t* block, int row, int run) { return block[128 + 32 * run + row]; }
  static uint8_t& min(uint8_t* block, int row, int run) { return block[384 + 32 * run + row]; }
  // Of bit 4 of a run.
  static int plane(int run, int) { return 640 + run / 2 * kPairBytes + run % 2 * kPlaneBytes; }
  static float d(const uint8_t* block, int row) { return f16_at(block + 2 * row); }
  static float dmin(const uint8_t* block, int row) { return f16_at(block + 64 + 2 * row); }
  static float scale(const uint8_t* block, int row, int run) { return block[128 + 32 * run + row]; }
  static float min(const uint8_t* block, int row, int run) { return block[384 + 32 * run + row]; }

  static void values(const uint8_t* block, int row, int run, uint8_t* u) {
    read_nibbles(block + kFirstSection + run / 2 * kSectionBytes, row, run % 2, 32, u);
    if constexpr (kPlanes == 1) or_from_plane(block + plane(run, 0), row, 4, u);
  }
};
using PanelQ4_K = PanelK<4>;
using PanelQ5_K = PanelK<5>;

struct PanelQ6_K {
  static constexpr int kPairBytes = 4 * kPlaneBytes + 8 * kStepBytes;
  static constexpr int kColumns = 256, kBytes = 576 + 4 * kPairBytes, kOffset = 32;
  static constexpr int kPlanes = 2, kSections = 4, kSectionSteps = 8,
                       kFirstSection = 576 + 2 * kPlanes * kPlaneBytes, kSectionBytes = kPairBytes;

  static uint8_t* d(uint8_t* block, int row) { return block + 2 * row; }
  static uint8_t& scale(uint8_t* block, int row, int run16) { return block[64 + 32 * run16 + row]; }
  // Of bit 4 + index of a run.
  static int plane(int run, int index) {
    return 576 + run / 2 * kPairBytes + (2 * index + run % 2) * kPlaneBytes;
  }
  static float d(const uint8_t* block, int row) { return f16_at(block + 2 * row); }
  static float scale(const uint8_t* block, int row, int run16) {
    return static_cast<int8_t>(block[64 + 32 * run16 + row]);
  }

  static void values(const uint8_t* block, int row, int run, uint8_t* u) {
    read_nibbles(block + kFirstSection + run / 2 * kSectionBytes, row, run % 2, 32, u);
    or_from_plane(block + plane(run, 0), row, 4, u);
    or_from_plane(block + plane(run, 1), row, 5, u);
  }
};

static_assert(PanelQ8_0::kBytes == layout_of(WeightFormat::kQ8_0).panel_block_bytes);
static_assert(PanelQ4_0::kBytes == layout_of(WeightFormat::kQ4_0).panel_block_bytes);
static_assert(PanelQ4_K::kBytes == layout_of(WeightFormat::kQ4_K).panel_block_bytes);
static_assert(PanelQ5_K::kBytes == layout_of(WeightFormat::kQ5_K).panel_block_bytes);
static_assert(PanelQ6_K::kBytes == layout_of(WeightFormat::kQ6_K).panel_block_bytes);
static_assert(PanelInt8::kBytes == layout_of(WeightFormat::kInt8).panel_block_bytes);
static_assert(PanelInt4::kBytes == layout_of(WeightFormat::kInt4).panel_block_bytes);

}  // namespace twofold::kernels
