// AMX (tiles, INT8, BF16): the tile instructions of amx/bf16.h and amx/integer.h.
#include "amx/products.h"

namespace twofold::kernels {
namespace {

struct CpuTiles {
  static constexpr bool kAnyTokenCount = false;

  // GCC's intrinsics take the numbers of tiles as text, which a template does not have.
  static void configure(const TileConfig* config) { __asm__ volatile("ldtilecfg %0" : : "m"(*config)); }
  static void release() { __asm__ volatile("tilerelease"); }
  template <int Tile>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
  }
  template <int Tile>
  static void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  static void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
  }
  template <int C, int A, int B>
  static void add_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  static void add_int8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  static void add_signed_unsigned() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

constexpr KernelTable kPart = amx_part<CpuTiles>();

}  // namespace

const KernelTable* amx_level() { return &kPart; }

}  // namespace twofold::kernels
