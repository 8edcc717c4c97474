// The AMX level's products of bfloat16 activations with packed bfloat16 weights, written over T
// (amx/tiles.h).
//
// Up to 32 tokens: the sums stay in their tiles from the first column to the last, and weights stream past.
// More: a block of columns of a panel stays in the first-level cache while all tokens pass in groups of 32,
// whose sums wait on the stack. The order of the additions is the same.
#pragma once
#include "amx/tiles.h"
#include "avx512/rows.h"

namespace twofold::kernels {
namespace {

template <class T>
struct AmxBf16Products {
  using Tiles = AmxTiles<T>;
  static constexpr int kTokens = Tiles::kTokens, kTileSlice = Tiles::kTileSlice;
  static constexpr int kTileSlices = 16;    // in a tile of weights: 32 columns
  static constexpr int kBlockSlices = 256;  // in a block of columns: 32 KiB of weights
  static constexpr int kMostGroups = 8;     // whose sums are held
  static constexpr int kAheadBytes = 4096;

  struct Add {
    template <int C, int A, int B>
    void operator()() const {
      T::template add_bf16<C, A, B>();
    }
  };

  // What is at hand of a panel: slices [begin, end), and how many bytes further on to fetch meanwhile (0:
  // none).
  struct Block {
    const uint8_t* panel;
    int begin, end, ahead;
  };

  static void add_block(const char* x, int64_t row_bytes, const Block& block, int tokens, float* sums) {
    const bool second = tokens > Tiles::kGroup;
    if (block.begin == 0) {
      Tiles::zero_sums(second);
    } else {
      Tiles::load_sums(sums, second);
    }
    int s = block.begin;
    for (; s + kTileSlices <= block.end; s += kTileSlices) {
      const uint8_t* weights = block.panel + static_cast<int64_t>(s) * kTileSlice;
      if (block.ahead != 0) {
        for (int i = 0; i < kTileSlices * kTileSlice; i += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(weights) + block.ahead + i, _MM_HINT_T0);
        }
      }
      Tiles::multiply(x + 4 * s, row_bytes, weights, second, Add());
    }
    if (s < block.end) {  // bytes after the panel are arbitrary, and 0 * infinity is not 0
      alignas(64) uint8_t last[kTileSlices * kTileSlice] = {};
      for (int i = 0; i < (block.end - s) * kTileSlice; i += 64) {
        _mm512_store_si512(last + i,
                           _mm512_loadu_si512(block.panel + static_cast<int64_t>(s) * kTileSlice + i));
      }
      Tiles::multiply(x + 4 * s, row_bytes, last, second, Add());
    }
    Tiles::store_sums(sums, second);
  }

  static void strip(const char* x, int64_t row_bytes, const uint8_t* panels, float* y, int64_t ldy,
                    const TokenGroups& groups, int N, int K) {
    const int slices = (K + 1) / 2;
    const int block_slices = groups.count == 1 ? slices : kBlockSlices;
    alignas(64) float sums[kMostGroups][kTokens * kPanelRows];
    for (int n = 0; n < N; n += kPanelRows, panels += static_cast<int64_t>(slices) * kTileSlice) {
      for (int begin = 0; begin == 0 || begin < slices; begin += block_slices) {
        const int end = slices - begin < block_slices ? slices : begin + block_slices;
        for (int g = 0; g < groups.count; ++g) {
          const int ahead = g > 0 ? 0 : groups.count == 1 ? kAheadBytes : kBlockSlices * kTileSlice;
          add_block(x + groups.begin(g) * row_bytes, row_bytes, {panels, begin, end, ahead}, groups.size,
                    sums[g]);
        }
      }
      for (int g = 0; g < groups.count; ++g) {
        float* to = y + groups.begin(g) * ldy + n;
        for (int t = 0; t < groups.size; ++t) {
          Avx512Rows::store_rows(sums[g] + kPanelRows * t, N - n, to + t * ldy);
        }
      }
    }
  }

  static void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                     int N, int K) {
    int configured = 0;
    for (int m = 0; m < M; m += kMostGroups * kTokens) {
      const TokenGroups groups(M - m < kMostGroups * kTokens ? M - m : kMostGroups * kTokens, kTokens);
      if (groups.size != configured) Tiles::configure(configured = groups.size, 64);
      strip(static_cast<const char*>(x) + m * row_bytes, row_bytes, static_cast<const uint8_t*>(panels),
            y + m * ldy, ldy, groups, N, K);
    }
    if (configured != 0) T::release();
  }
};

// The BF16 format's part of the AMX level.
template <class T>
constexpr void add_amx_bf16(KernelTable& part) {
  part.formats[static_cast<int>(WeightFormat::kBF16)] = {ActivationKind::kBF16, AmxBf16Products<T>::matmul,
                                                         nullptr};
}

}  // namespace
}  // namespace twofold::kernels
