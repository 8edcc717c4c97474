// A panel's weights as rows of float32, as unpack_row() gives them. The words of a row's slices are gathered first, so that
// the compiler vectorises the loops over a row's columns. Minima are added with one rounding where a level has that
// instruction. Anonymous namespace, as subblock_scales.h.
#pragma once
#include <cstdint>

#include "twofold/kernels.h"

namespace twofold::kernels {
namespace {

// 0 to kCount - 1 as a parameter pack; no header of std:: may be compiled for a level.
template <int... kNumber>
struct Numbers {};
template <int kCount, int... kNumber>
struct Count : Count<kCount - 1, kCount - 1, kNumber...> {};
template <int... kNumber>
struct Count<0, kNumber...> {
  using type = Numbers<kNumber...>;
};

// Rows of 32-bit words, from slices that begin `stride` bytes after each other: blocks of words turned by rounds of
// interleaving. Word by word it took a third of a training step.
template <int kLanes, int kSlices>
struct SliceRows {
  static constexpr int kSide = kLanes >= kSlices ? kSlices : kLanes >= 8 ? 8 : 4;
  typedef uint32_t Words __attribute__((vector_size(4 * kSide)));
  alignas(64) uint32_t words[kPanelRows][kSlices];

  SliceRows(const uint8_t* slices, int64_t stride) {
    for (int s = 0; s < kSlices; s += kSide) {
      for (int r = 0; r < kPanelRows; r += kSide) turn(slices + s * stride + 4 * r, stride, &words[r][s]);
    }
  }

 private:
  static void turn(const uint8_t* from, int64_t stride, uint32_t* to) {
    Words block[kSide], mixed[kSide];
    for (int i = 0; i < kSide; ++i) __builtin_memcpy(&block[i], from + i * stride, sizeof(Words));
    for (int round = 1; round < kSide; round *= 2) {
      for (int i = 0; i < kSide / 2; ++i) {
        mixed[2 * i] = interleaved<0>(block[i], block[i + kSide / 2], typename Count<kSide>::type());
        mixed[2 * i + 1] =
            interleaved<kSide / 2>(block[i], block[i + kSide / 2], typename Count<kSide>::type());
      }
      for (int i = 0; i < kSide; ++i) block[i] = mixed[i];
    }
    for (int i = 0; i < kSide; ++i) __builtin_memcpy(to + i * kSlices, &block[i], sizeof(Words));
  }

  // Words of a and b in turn, from word kFirst on.
  template <int kFirst, int... kLane>
  static Words interleaved(Words a, Words b, Numbers<kLane...>) {
    return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * kSide)...);
  }
};

template <int kBits>
struct UnsignedOf {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<16> {
  using type = uint16_t;
};
template <int kBits>
using Unsigned = typename UnsignedOf<kBits>::type;

// V supplies the integers of quantised formats and is not used for others.
template <class V, class Format>
struct UnpackedPanel {
  static constexpr int kSubblockSlices = kSubblockColumns / 4;
  static constexpr int kHalves = 2, kHalfColumns = kSubblockColumns / kHalves;

  static void floats(const uint8_t* panel, int64_t columns, float* out) {
    constexpr int kOfSlice = Format::kSliceColumns, kSlices = 16, kBits = 32 / kOfSlice;
    constexpr int64_t kColumns = kSlices * kOfSlice;
    for (int64_t k = 0; k < columns; k += kColumns) {
      const uint8_t* const block = panel + k / Format::kPanelColumns * Format::kPanelBytes;
      const uint8_t* const slices =
          block + Format::kHeaderBytes + k % Format::kPanelColumns / kOfSlice * kSliceBytes;
      const int64_t here = columns - k < kColumns ? columns - k : kColumns;
      if (here < kColumns) return few(block, slices, here, columns, out + k);
      const SliceRows<V::kLanes, kSlices> rows(slices, kSliceBytes);
      for (int r = 0; r < kPanelRows; ++r) {
        float* const to = out + r * columns + k;
        float scale = 1.0f;
        if constexpr (Format::kScaleGrid > 0) scale = load_as<float>(block + 4 * r);
        Unsigned<kBits> bits[kColumns];
        __builtin_memcpy(bits, rows.words[r], sizeof bits);
        for (int c = 0; c < kColumns; ++c) to[c] = scaled(Format::value(bits[c]), scale);
      }
    }
  }

  static void integers(const uint8_t* panel, int64_t columns, float* out) {
    for (int64_t k = 0; k < columns; k += kSubblockColumns) {
      const uint8_t* const block = panel + k / Format::kPanelColumns * Format::kPanelBytes;
      const int subblock = static_cast<int>(k % Format::kPanelColumns / kSubblockColumns);
      alignas(64) uint8_t bytes[kSubblockSlices * kSliceBytes];
      for (int slice = 0; slice < kSubblockSlices; ++slice) {
        for (int g = 0; g < kPanelRows / V::kLanes; ++g)
          V::store(bytes + slice * kSliceBytes + g * V::kBytes,
                   Format::template bytes<V>(block, subblock / Format::kGroupSubblocks,
                                             subblock % Format::kGroupSubblocks, slice, g));
      }
      const SliceRows<V::kLanes, kSubblockSlices> rows(bytes, kSliceBytes);
      const uint8_t* const of_rows = reinterpret_cast<const uint8_t*>(rows.words);
      alignas(64) float scale[kHalves][kPanelRows], least[kHalves][kPanelRows];
      for (int half = 0; half < kHalves; ++half) scales(block, subblock, half, scale[half], least[half]);
      for (int r = 0; r < kPanelRows; ++r) {
        for (int half = 0; half < kHalves; ++half) {
          const float factor = scale[half][r], added = Format::kMin ? least[half][r] : 0.0f;
          float* const to = out + r * columns + k + half * kHalfColumns;
          // From a loop over bytes GCC 12 moves them one by one, a quarter of a training step.
          for (int i = 0; i < kHalfColumns; i += V::kLanes) {
            const typename V::F u =
                V::unsigned_bytes(of_rows + r * kSubblockColumns + half * kHalfColumns + i);
            typename V::F values = factor * (u - static_cast<float>(Format::kZero));
            if constexpr (Format::kMin) values = values + added;
            V::store(to + i, values);
          }
        }
      }
    }
  }

 private:
  static float scaled(float value, float scale) { return Format::kScaleGrid > 0 ? value * scale : value; }

  // The last columns, fewer than a step's.
  static void few(const uint8_t* block, const uint8_t* slices, int64_t count, int64_t columns, float* out) {
    constexpr int kOfSlice = Format::kSliceColumns, kBits = 32 / kOfSlice;
    for (int r = 0; r < kPanelRows; ++r) {
      float scale = 1.0f;
      if constexpr (Format::kScaleGrid > 0) scale = load_as<float>(block + 4 * r);
      for (int64_t c = 0; c < count; ++c) {
        const uint32_t word = load_as<uint32_t>(slices + c / kOfSlice * kSliceBytes + 4 * r);
        const uint32_t bits = word >> (c % kOfSlice * kBits) & (0xffffffffu >> (32 - kBits));
        out[r * columns + c] = scaled(Format::value(bits), scale);
      }
    }
  }

  static void scales(const uint8_t* block, int subblock, int half, float* scale, float* least) {
    if constexpr (requires { Format::exact_half_scale(block, subblock, half, 0); }) {
      for (int r = 0; r < kPanelRows; ++r) scale[r] = Format::exact_half_scale(block, subblock, half, r);
    } else {
      for (int g = 0; g < kPanelRows / V::kLanes; ++g)
        V::store(scale + g * V::kLanes, Format::template scale<V>(block, subblock, half, g));
    }
    if constexpr (Format::kMin) {
      for (int g = 0; g < kPanelRows / V::kLanes; ++g)
        V::store(least + g * V::kLanes, Format::template min<V>(block, subblock, half, g));
    }
  }
};

template <class V, bool kIntegers>
constexpr void add_unpacking(KernelTable& part) {
  for_each_format([&]<class Format>(Format) {
    auto& unpack = part.unpack[static_cast<int>(kNumberOf<Format>)];
    if constexpr (is_integer<Format> && kIntegers) unpack = UnpackedPanel<V, Format>::integers;
    if constexpr (!is_integer<Format> && !kIntegers) unpack = UnpackedPanel<V, Format>::floats;
  });
}

}  // namespace
}  // namespace twofold::kernels
