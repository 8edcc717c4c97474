#include "twofold/peaks.h"

#include <cstring>

#include "twofold/kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Each loop keeps 12 accumulators: more than latency (4 to 6 cycles) times the two products a cycle that the
// widest cores start. The empty asm makes the compiler believe that the operands change.
namespace twofold::kernels {
namespace {
constexpr int kChains = 12;

#if defined(__x86_64__)
// Unrolled whole, so that the compiler keeps the array in registers. PRODUCT is an expression of `sum`.
#define TWOFOLD_PEAK(NAME, TARGET, VECTOR, PRODUCT)           \
  __attribute__((target(TARGET))) void NAME(int64_t rounds) { \
    VECTOR sums[kChains] = {};                                \
    for (int64_t round = 0; round < rounds; ++round) {        \
      _Pragma("GCC unroll 12") for (VECTOR& sum : sums) {     \
        sum = PRODUCT;                                        \
        asm volatile("" : "+x"(sum));                         \
      }                                                       \
    }                                                         \
  }

TWOFOLD_PEAK(f32_avx512, "avx512f", __m512, _mm512_fmadd_ps(sum, _mm512_set1_ps(0.5F), _mm512_set1_ps(0.5F)))
TWOFOLD_PEAK(f32_avx2, "avx2,fma", __m256, _mm256_fmadd_ps(sum, _mm256_set1_ps(0.5F), _mm256_set1_ps(0.5F)))
TWOFOLD_PEAK(bf16_avx512, "avx512f,avx512bw,avx512bf16", __m512,
             _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi16(0x3f00), (__m512bh)_mm512_set1_epi16(0x3f00)))
TWOFOLD_PEAK(int8_avx512, "avx512f,avx512bw,avx512vnni", __m512i,
             _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_set1_epi8(1)))
TWOFOLD_PEAK(int8_avx_vnni, "avx2,avxvnni", __m256i,
             _mm256_dpbusd_avx_epi32(sum, _mm256_set1_epi8(1), _mm256_set1_epi8(1)))
// Before VNNI an 8-bit product takes three instructions.
TWOFOLD_PEAK(int8_avx2, "avx2", __m256i,
             _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), sum),
                                                     _mm256_set1_epi16(1))))
#undef TWOFOLD_PEAK

// Four sums of tiles with two operands each, as products use them; three times a round, which makes twelve.
// Text, since GCC's intrinsics would need the file compiled for AMX.
struct alignas(64) FullTiles {  // as ldtilecfg reads it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
#define TWOFOLD_FOUR_PRODUCTS(PRODUCT)                                                \
  PRODUCT " %%tmm6, %%tmm4, %%tmm0\n\t" PRODUCT " %%tmm7, %%tmm4, %%tmm1\n\t" PRODUCT \
          " %%tmm6, %%tmm5, %%tmm2\n\t" PRODUCT " %%tmm7, %%tmm5, %%tmm3\n\t"
#define TWOFOLD_TILE_LOOP(PRODUCT)                                                 \
  const FullTiles config;                                                          \
  __asm__ volatile("ldtilecfg %0" : : "m"(config));                                \
  for (int64_t round = 0; round < rounds; ++round) {                               \
    __asm__ volatile(TWOFOLD_FOUR_PRODUCTS(PRODUCT) TWOFOLD_FOUR_PRODUCTS(PRODUCT) \
                         TWOFOLD_FOUR_PRODUCTS(PRODUCT)                            \
                     :                                                             \
                     :);                                                           \
  }                                                                                \
  __asm__ volatile("tilerelease")
void bf16_tiles(int64_t rounds) { TWOFOLD_TILE_LOOP("tdpbf16ps"); }
void int8_tiles(int64_t rounds) { TWOFOLD_TILE_LOOP("tdpbssd"); }
#undef TWOFOLD_TILE_LOOP
#undef TWOFOLD_FOUR_PRODUCTS
#endif

void f32_generic(int64_t rounds) {
  float sums[kChains] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    for (float& sum : sums) {
      sum = sum * 0.5F + 0.5F;
#if defined(__x86_64__)
      asm volatile("" : "+x"(sum));
#endif
    }
  }
}

struct Peak {
  const char* level;  // the first that has it
  const char* kind;
  void (*run)(int64_t);
  int64_t operations;  // in one product instruction
};

// Best last.
constexpr Peak kPeaks[] = {
    {"generic", "f32", f32_generic, 2},
#if defined(__x86_64__)
    {"avx2", "f32", f32_avx2, 16},
    {"avx2", "int8", int8_avx2, 64},
    {"avx_vnni", "int8", int8_avx_vnni, 64},
    {"avx512", "f32", f32_avx512, 32},
    {"avx512_vnni", "int8", int8_avx512, 128},
    {"avx512_bf16", "bf16", bf16_avx512, 64},
    {"amx", "bf16_tiles", bf16_tiles, int64_t{2} * 16 * 16 * 32},
    {"amx", "int8_tiles", int8_tiles, int64_t{2} * 16 * 16 * 64},
#endif
};

int rank_of(const char* level) {
  int rank = 0;
  for (const char* const* name = level_names(); *name != nullptr; ++name, ++rank) {
    if (std::strcmp(*name, level) == 0) return rank;
  }
  return -1;
}
}  // namespace

int64_t peak_operations(const char* level, const char* kind, int64_t rounds) {
  const Peak* best = nullptr;
  for (const Peak& peak : kPeaks) {
    if (std::strcmp(peak.kind, kind) != 0 || rank_of(peak.level) > rank_of(level)) continue;
    if (table_for_level(peak.level) != nullptr) best = &peak;
  }
  if (best == nullptr) return 0;
  best->run(rounds);
  return rounds * kChains * best->operations;
}

}  // namespace twofold::kernels
