// The products of the AMX level, written over T, which carries out the tile instructions: the CPU's (amx.cpp)
// or plain code with the same meaning (amx_emulated.cpp). The rest of a kernel uses AVX-512.
//
// UNTRIED ON HARDWARE: no machine with AMX was at hand. What the tests check is the emulation on the same
// buffers: tile shapes, strides, packing and the arithmetic around the tiles. Nothing here was timed or
// tuned.
//
// Tiles: 0-3 are sums, [16 tokens][16 rows of weights] for two groups of tokens x the two halves of a panel;
// 4 and 5 hold activations of the two groups, one row per token; 6 and 7 hold weights of the two halves.
// Sixteen rows of a step are 64 consecutive bytes of a panel, and steps are 128 bytes apart, so weights are
// loaded as tiles from where they lie.
#pragma once
#include <immintrin.h>

#include "levels.h"

namespace twofold::kernels {
namespace {

struct alignas(64) TileConfig {  // as ldtilecfg reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

template <class T>
struct AmxProducts {
  static constexpr int kGroup = 16;  // tokens of a tile
  static constexpr int kTokens = 2 * kGroup;
  static constexpr int kStep = 4 * kPanelRows;  // bytes

  // Tiles for `tokens` (1 to 32) rows of activations, `x_bytes` of each at a time.
  static void configure(int tokens, int x_bytes) {
    TileConfig config;
    for (int group = 0; group < 2; ++group) {
      const int here = group == 0 ? (tokens < kGroup ? tokens : kGroup) : tokens - kGroup;
      if (here <= 0) break;
      config.set(2 * group, here, 64);
      config.set(2 * group + 1, here, 64);
      config.set(4 + group, here, x_bytes);
    }
    config.set(6, x_bytes / 4, 64);
    config.set(7, x_bytes / 4, 64);
    T::configure(&config);
  }

  // sums[t][32] += x[t][.] * w[.][32] for one tile's worth of columns; Add is the product of two tiles.
  template <class Add>
  static void multiply(const void* x, int64_t row_bytes, const uint8_t* steps, bool second, const Add& add) {
    T::template load<6>(steps, kStep);
    T::template load<7>(steps + 64, kStep);
    T::template load<4>(x, row_bytes);
    add.template operator()<0, 4, 6>();
    add.template operator()<1, 4, 7>();
    if (!second) return;
    T::template load<5>(static_cast<const char*>(x) + kGroup * row_bytes, row_bytes);
    add.template operator()<2, 5, 6>();
    add.template operator()<3, 5, 7>();
  }

  static void zero_sums(bool second) {
    T::template zero<0>();
    T::template zero<1>();
    if (!second) return;
    T::template zero<2>();
    T::template zero<3>();
  }

  // sums [tokens][32] of 4 bytes.
  static void store_sums(void* sums, bool second) {
    char* to = static_cast<char*>(sums);
    T::template store<0>(to, kStep);
    T::template store<1>(to + 64, kStep);
    if (!second) return;
    T::template store<2>(to + kGroup * kStep, kStep);
    T::template store<3>(to + kGroup * kStep + 64, kStep);
  }

  static void write(const float* sums, int tokens, float* y, int64_t ldy, int rows) {
    const uint32_t all = rows >= 32 ? 0xffffffffu : (1u << rows) - 1u;
    for (int t = 0; t < tokens; ++t) {
      _mm512_mask_storeu_ps(y + t * ldy, static_cast<__mmask16>(all), _mm512_load_ps(sums + t * kPanelRows));
      _mm512_mask_storeu_ps(y + t * ldy + 16, static_cast<__mmask16>(all >> 16),
                            _mm512_load_ps(sums + t * kPanelRows + 16));
    }
  }

  // Product(x, row_bytes, panel, K, tokens, sums) for every panel and every 32 tokens.
  template <class Product>
  static void for_all(const void* x, int64_t row_bytes, const void* panels, int64_t each, float* y,
                      int64_t ldy, int M, int N, int K, int x_bytes, const Product& product) {
    alignas(64) float sums[kTokens * kPanelRows];
    const uint8_t* panel = static_cast<const uint8_t*>(panels);
    int configured = 0;
    for (int n = 0; n < N; n += kPanelRows, panel += each) {
      for (int m = 0; m < M; m += kTokens) {
        const int tokens = M - m < kTokens ? M - m : kTokens;
        if (tokens != configured) configure(configured = tokens, x_bytes);
        product(static_cast<const char*>(x) + m * row_bytes, row_bytes, panel, K, tokens, sums);
        write(sums, tokens, y + m * ldy + n, ldy, N - n);
      }
    }
    if (configured != 0) T::release();
  }

  struct AddBf16 {
    template <int C, int A, int B>
    void operator()() const {
      T::template add_bf16<C, A, B>();
    }
  };

  // bf16: a tile of weights is 16 steps, 32 columns; the sums stay in their tiles from the first column to
  // the last.
  static void bf16_product(const char* x, int64_t row_bytes, const uint8_t* panel, int K, int tokens,
                           float* sums) {
    const bool second = tokens > kGroup;
    const int steps = (K + 1) / 2;
    zero_sums(second);
    int s = 0;
    for (; s + 16 <= steps; s += 16) multiply(x + 4 * s, row_bytes, panel + s * kStep, second, AddBf16());
    if (s < steps) {  // what lies behind the panel may be anything, and 0 * infinity is not 0
      alignas(64) uint8_t last[16 * kStep] = {};
      for (int i = 0; i < (steps - s) * kStep; i += 64) {
        _mm512_store_si512(last + i, _mm512_loadu_si512(panel + s * kStep + i));
      }
      multiply(x + 4 * s, row_bytes, last, second, AddBf16());
    }
    store_sums(sums, second);
  }

  static void matmul_bf16(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                          int N, int K) {
    for_all(x, row_bytes, panels, panel_bytes(WeightFormat::kBF16, K), y, ldy, M, N, K, 64, bf16_product);
  }

  struct AddInt8 {
    template <int C, int A, int B>
    void operator()() const {
      T::template add_int8<C, A, B>();
    }
  };

  // Where a q8 row's scales and sums lie behind its integers.
  struct Q8 {
    int64_t columns;
    const float* scales(const char* row) const { return reinterpret_cast<const float*>(row + columns); }
    const int32_t* sums16(const char* row) const {
      return reinterpret_cast<const int32_t*>(row + columns + columns / 8);
    }
  };

  static __m512 scales_at(const uint8_t* f16) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(f16)));
  }

  // q8_0 (a run of 32 columns per block) and int8 (four): a tile of weights is a run, 8 steps. The sums of a
  // run leave their tiles as integers; the arithmetic after that is generic_packed.cpp's.
  template <int Runs>
  static void int8_product(const char* x, int64_t row_bytes, const uint8_t* panel, int K, int tokens,
                           float* sums) {
    constexpr int kBlockBytes = 64 + Runs * 8 * kStep;
    const bool second = tokens > kGroup;
    const Q8 q8{activation_columns(K)};
    alignas(64) int32_t products[kTokens * kPanelRows];
    alignas(64) float partial[kTokens * kPanelRows];
    for (int i = 0; i < tokens * kPanelRows; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    int run = 0;
    for (; run * 32 < K; panel += kBlockBytes) {
      const __m512 scale[2] = {scales_at(panel), scales_at(panel + 32)};
      for (int r = 0; r < Runs; ++r, ++run) {
        zero_sums(second);
        multiply(x + 32 * run, row_bytes, panel + 64 + r * 8 * kStep, second, AddInt8());
        store_sums(products, second);
        for (int t = 0; t < tokens; ++t) {
          const char* row = x + t * row_bytes;
          const int32_t* sum = q8.sums16(row) + 2 * run;
          const __m512i offset = _mm512_set1_epi32(-128 * (sum[0] + sum[1]));
          const __m512 xs = _mm512_set1_ps(q8.scales(row)[run]);
          for (int half = 0; half < 2; ++half) {
            const int at = t * kPanelRows + 16 * half;
            const __m512 product =
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(products + at), offset));
            if constexpr (Runs == 1) {
              const __m512 scaled = _mm512_mul_ps(product, scale[half]);
              _mm512_store_ps(sums + at, _mm512_fmadd_ps(scaled, xs, _mm512_load_ps(sums + at)));
            } else {
              const __m512 here = r == 0 ? _mm512_mul_ps(product, xs)
                                         : _mm512_fmadd_ps(product, xs, _mm512_load_ps(partial + at));
              if (r + 1 < Runs) {
                _mm512_store_ps(partial + at, here);
              } else {
                _mm512_store_ps(sums + at, _mm512_fmadd_ps(here, scale[half], _mm512_load_ps(sums + at)));
              }
            }
          }
        }
      }
    }
  }

  template <WeightFormat Format, int Runs>
  static void matmul_int8(const void* x, int64_t row_bytes, const void* panels, float* y, int64_t ldy, int M,
                          int N, int K) {
    // Few tokens leave tiles mostly empty; the level below gives the same bits.
    const PackedMatmul below = avx512_vnni_integer()->of(Format).matmul;
    if (M < T::kFewestTokens && below != nullptr) return below(x, row_bytes, panels, y, ldy, M, N, K);
    for_all(x, row_bytes, panels, panel_bytes(Format, K), y, ldy, M, N, K, 32, int8_product<Runs>);
  }

  static constexpr KernelTable part() {
    KernelTable table;
    table.formats[static_cast<int>(WeightFormat::kBF16)] = {ActivationKind::kBF16, matmul_bf16, nullptr};
    table.formats[static_cast<int>(WeightFormat::kQ8_0)] = {ActivationKind::kQ8,
                                                            matmul_int8<WeightFormat::kQ8_0, 1>, nullptr};
    table.formats[static_cast<int>(WeightFormat::kInt8)] = {ActivationKind::kQ8,
                                                            matmul_int8<WeightFormat::kInt8, 4>, nullptr};
    return table;
  }
};

}  // namespace
}  // namespace twofold::kernels
