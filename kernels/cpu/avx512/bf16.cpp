// AVX-512 with BF16: products of packed bfloat16 weights with bfloat16 activations, two columns per
// instruction. Row-major products keep float32 activations, as on the other levels.
//
// A slice of a panel is two vectors of 16 rows x 2 columns; an activation's two columns are broadcast to all
// rows. Per output element all pairs of columns are added one after the other, so blocks of columns and tiles
// of tokens only decide what is computed side by side. Many tokens: a block of columns stays in the
// first-level cache while all tokens pass, a tile of up to 12 of them in 24 registers; their sums wait on the
// stack.
#include <immintrin.h>

#include "avx512/rows.h"
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr int kTileTokens = 12;
constexpr int kTokenBlock = 8 * kTileTokens;  // whose sums are held on the stack
constexpr int kBlockSlices = 64;              // in a block of columns: 8 KiB of weights
constexpr int kAhead = 8192;                  // bytes that a single tile prefetches ahead

__m512bh weights_at(const uint8_t* p) {
  __m512i loaded = _mm512_loadu_si512(p);
  __asm__("" : "+v"(loaded));  // GCC 12 would load it again for every token of the tile
  return reinterpret_cast<__m512bh>(loaded);
}

// Adds `slices` slices to the sums [T][32] of T tokens, which are zero before the first.
template <int T>
void tile(const char* x, int64_t row_bytes, const uint8_t* panel, int slices, int ahead, bool first,
          float* sums) {
  __m512 acc[T][2];
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t) {
    acc[t][0] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + t * kPanelRows);
    acc[t][1] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + t * kPanelRows + 16);
  }
#pragma GCC unroll 2
  for (int s = 0; s < slices; ++s) {
    const __m512bh low = weights_at(panel), high = weights_at(panel + 64);
    _mm_prefetch(reinterpret_cast<const char*>(panel + ahead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(panel + ahead + 64), _MM_HINT_T0);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      int32_t pair;
      __builtin_memcpy(&pair, x + t * row_bytes + 4 * s, 4);
      const __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      acc[t][0] = _mm512_dpbf16_ps(acc[t][0], value, low);
      acc[t][1] = _mm512_dpbf16_ps(acc[t][1], value, high);
    }
    panel += kSliceBytes;
  }
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t) {
    _mm512_store_ps(sums + t * kPanelRows, acc[t][0]);
    _mm512_store_ps(sums + t * kPanelRows + 16, acc[t][1]);
  }
}

template <int T>
void tile_of(int tokens, const char* x, int64_t row_bytes, const uint8_t* panel, int slices, int ahead,
             bool first, float* sums) {
  if constexpr (T > 1) {
    if (tokens < T) return tile_of<T - 1>(tokens, x, row_bytes, panel, slices, ahead, first, sums);
  }
  tile<T>(x, row_bytes, panel, slices, ahead, first, sums);
}

void matmul_block(const char* x, int64_t row_bytes, const uint8_t* panels, float* y, int64_t ldy, int M,
                  int N, int K) {
  const int slices = (K + 1) / 2;
  const int tiles = (M + kTileTokens - 1) / kTileTokens;
  const int block = tiles == 1 ? slices : kBlockSlices;
  alignas(64) float sums[kTokenBlock * kPanelRows];
  for (int n = 0; n < N; n += kPanelRows, panels += static_cast<int64_t>(slices) * kSliceBytes) {
    int slice = 0;
    do {
      const int here = slices - slice < block ? slices - slice : block;
      int left = tiles;
      for (int m = 0; m < M; --left) {
        const int tokens = (M - m + left - 1) / left;  // as even as possible
        // The first tokens prefetch what follows: the stream itself, or the next block while this one is used.
        const int ahead = m > 0 ? 0 : tiles == 1 ? kAhead : kBlockSlices * kSliceBytes;
        tile_of<kTileTokens>(tokens, x + m * row_bytes + 4 * static_cast<int64_t>(slice), row_bytes,
                             panels + static_cast<int64_t>(slice) * kSliceBytes, here, ahead, slice == 0,
                             sums + m * kPanelRows);
        m += tokens;
      }
      slice += here;
    } while (slice < slices);
    for (int m = 0; m < M; ++m) {
      Avx512Rows::store_rows(sums + m * kPanelRows, N - n, y + m * ldy + n);
    }
  }
}

void matmul(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M, int N,
            int K) {
  const char* rows = static_cast<const char*>(x);
  for (int m = 0; m < M; m += kTokenBlock) {
    matmul_block(rows + m * row_bytes, row_bytes, static_cast<const uint8_t*>(panels), y + m * ldy, ldy,
                 M - m < kTokenBlock ? M - m : kTokenBlock, N, K);
  }
}

constexpr KernelTable make_part() {
  KernelTable part;
  part.formats[static_cast<int>(WeightFormat::kBF16)] = {ActivationKind::kBF16, matmul, nullptr};
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* avx512_bf16_level() { return &kPart; }

}  // namespace twofold::kernels
