// The AMX level's kernels with tiles in memory, for tests on CPUs without AMX (with AVX-512): what the
// instructions do, as Intel's manual writes it, on the bytes and shapes that the kernels give them. Bytes
// outside a tile's shape are kept wrong on purpose.
#include "amx/products.h"

namespace twofold::kernels {
namespace {

// Calls, not copies: inlined into every product, these functions took the compiler longer than any other
// file (54 s), for code that only tests run.
#define TWOFOLD_CALLED __attribute__((noinline))

struct EmulatedTiles {
  static constexpr bool kAnyTokenCount = true;

  struct Tile {
    uint8_t bytes[16][64];
  };
  static thread_local TileConfig config;
  static thread_local Tile tiles[8];

  static void configure(const TileConfig* wanted) {
    config = *wanted;
    release();
  }
  static void release() {
    for (Tile& tile : tiles) __builtin_memset(&tile, 0xa5, sizeof tile);
  }

  static int rows(int tile) { return config.rows[tile]; }
  static int bytes(int tile) { return config.row_bytes[tile]; }

  template <int At>
  TWOFOLD_CALLED static void zero() {
    for (int r = 0; r < rows(At); ++r)
      __builtin_memset(tiles[At].bytes[r], 0, static_cast<size_t>(bytes(At)));
  }
  template <int At>
  TWOFOLD_CALLED static void load(const void* p, int64_t stride) {
    for (int r = 0; r < rows(At); ++r) {
      __builtin_memcpy(tiles[At].bytes[r], static_cast<const char*>(p) + r * stride,
                       static_cast<size_t>(bytes(At)));
    }
  }
  template <int At>
  TWOFOLD_CALLED static void store(void* p, int64_t stride) {
    for (int r = 0; r < rows(At); ++r) {
      __builtin_memcpy(static_cast<char*>(p) + r * stride, tiles[At].bytes[r],
                       static_cast<size_t>(bytes(At)));
    }
  }

  // The instructions fault when the shapes of their tiles do not go together.
  static void check(int c, int a, int b) {
    if (rows(c) != rows(a) || bytes(c) != bytes(b) || rows(b) != bytes(a) / 4 || rows(c) == 0)
      __builtin_trap();
  }

  // Weights are bytes of type W.
  template <int C, int A, int B, class W>
  TWOFOLD_CALLED static void add_bytes() {
    check(C, A, B);
    for (int m = 0; m < rows(C); ++m) {
      for (int n = 0; n < bytes(C) / 4; ++n) {
        uint32_t sum;  // which may wrap around
        __builtin_memcpy(&sum, tiles[C].bytes[m] + 4 * n, 4);
        for (int k = 0; k < rows(B); ++k) {
          for (int i = 0; i < 4; ++i) {
            sum += static_cast<uint32_t>(static_cast<int8_t>(tiles[A].bytes[m][4 * k + i]) *
                                         static_cast<W>(tiles[B].bytes[k][4 * n + i]));
          }
        }
        __builtin_memcpy(tiles[C].bytes[m] + 4 * n, &sum, 4);
      }
    }
  }
  template <int C, int A, int B>
  static void add_int8() {
    add_bytes<C, A, B, int8_t>();
  }
  template <int C, int A, int B>
  static void add_signed_unsigned() {
    add_bytes<C, A, B, uint8_t>();
  }

  static float bf16_at(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  }

  template <int C, int A, int B>
  TWOFOLD_CALLED static void add_bf16() {
    check(C, A, B);
    for (int m = 0; m < rows(C); ++m) {
      for (int n = 0; n < bytes(C) / 4; ++n) {
        float sum, halves[2] = {0, 0};
        __builtin_memcpy(&sum, tiles[C].bytes[m] + 4 * n, 4);
        for (int k = 0; k < rows(B); ++k) {
          for (int i = 0; i < 2; ++i) {
            const float x = bf16_at(tiles[A].bytes[m] + 4 * k + 2 * i);
            halves[i] = __builtin_fmaf(x, bf16_at(tiles[B].bytes[k] + 4 * n + 2 * i), halves[i]);
          }
        }
        sum += halves[0] + halves[1];
        __builtin_memcpy(tiles[C].bytes[m] + 4 * n, &sum, 4);
      }
    }
  }
};

thread_local TileConfig EmulatedTiles::config;
thread_local EmulatedTiles::Tile EmulatedTiles::tiles[8];

constexpr KernelTable kPart = amx_part<EmulatedTiles>();

}  // namespace

const KernelTable* amx_emulated() { return &kPart; }

}  // namespace twofold::kernels
