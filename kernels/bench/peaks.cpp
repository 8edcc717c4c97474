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
// Twelve variables and no array: the compiler would keep an array in memory.
#define TWOFOLD_STEP(sum, PRODUCT) \
  sum = PRODUCT(sum);              \
  asm volatile("" : "+x"(sum))
#define TWOFOLD_PEAK_LOOP(VECTOR, ZERO, PRODUCT)                                                     \
  VECTOR s0 = ZERO, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0, s9 = s0, \
         s10 = s0, s11 = s0;                                                                         \
  for (int64_t round = 0; round < rounds; ++round) {                                                 \
    TWOFOLD_STEP(s0, PRODUCT);                                                                       \
    TWOFOLD_STEP(s1, PRODUCT);                                                                       \
    TWOFOLD_STEP(s2, PRODUCT);                                                                       \
    TWOFOLD_STEP(s3, PRODUCT);                                                                       \
    TWOFOLD_STEP(s4, PRODUCT);                                                                       \
    TWOFOLD_STEP(s5, PRODUCT);                                                                       \
    TWOFOLD_STEP(s6, PRODUCT);                                                                       \
    TWOFOLD_STEP(s7, PRODUCT);                                                                       \
    TWOFOLD_STEP(s8, PRODUCT);                                                                       \
    TWOFOLD_STEP(s9, PRODUCT);                                                                       \
    TWOFOLD_STEP(s10, PRODUCT);                                                                      \
    TWOFOLD_STEP(s11, PRODUCT);                                                                      \
  }

__attribute__((target("avx512f"))) void f32_avx512(int64_t rounds) {
  const __m512 a = _mm512_set1_ps(0.5F);
#define TWOFOLD_PRODUCT(sum) _mm512_fmadd_ps(sum, a, a)
  TWOFOLD_PEAK_LOOP(__m512, _mm512_setzero_ps(), TWOFOLD_PRODUCT)
#undef TWOFOLD_PRODUCT
}

__attribute__((target("avx2,fma"))) void f32_avx2(int64_t rounds) {
  const __m256 a = _mm256_set1_ps(0.5F);
#define TWOFOLD_PRODUCT(sum) _mm256_fmadd_ps(sum, a, a)
  TWOFOLD_PEAK_LOOP(__m256, _mm256_setzero_ps(), TWOFOLD_PRODUCT)
#undef TWOFOLD_PRODUCT
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) void bf16_avx512(int64_t rounds) {
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00);
#define TWOFOLD_PRODUCT(sum) _mm512_dpbf16_ps(sum, a, a)
  TWOFOLD_PEAK_LOOP(__m512, _mm512_setzero_ps(), TWOFOLD_PRODUCT)
#undef TWOFOLD_PRODUCT
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) void int8_avx512(int64_t rounds) {
  const __m512i a = _mm512_set1_epi8(1);
#define TWOFOLD_PRODUCT(sum) _mm512_dpbusd_epi32(sum, a, a)
  TWOFOLD_PEAK_LOOP(__m512i, _mm512_setzero_si512(), TWOFOLD_PRODUCT)
#undef TWOFOLD_PRODUCT
}

__attribute__((target("avx2,avxvnni"))) void int8_avx_vnni(int64_t rounds) {
  const __m256i a = _mm256_set1_epi8(1);
#define TWOFOLD_PRODUCT(sum) _mm256_dpbusd_avx_epi32(sum, a, a)
  TWOFOLD_PEAK_LOOP(__m256i, _mm256_setzero_si256(), TWOFOLD_PRODUCT)
#undef TWOFOLD_PRODUCT
}

// Before VNNI an 8-bit product takes three instructions.
__attribute__((target("avx2"))) void int8_avx2(int64_t rounds) {
  const __m256i a = _mm256_set1_epi8(1);
  const __m256i ones = _mm256_set1_epi16(1);
#define TWOFOLD_PRODUCT(sum) _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, sum), ones))
  TWOFOLD_PEAK_LOOP(__m256i, _mm256_setzero_si256(), TWOFOLD_PRODUCT)
#undef TWOFOLD_PRODUCT
}
#undef TWOFOLD_PEAK_LOOP
#undef TWOFOLD_STEP

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
