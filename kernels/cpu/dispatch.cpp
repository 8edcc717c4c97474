// Chooses the level: what the CPU has and the operating system enables (cpuid, xgetbv), unless TWOFOLD_ISA
// decides.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace twofold::kernels {
namespace {

#if defined(__x86_64__)
uint64_t enabled_state() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (1u << 27)) == 0) return 0;  // no OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}
#endif

constexpr const char* kNames[] = {"generic",
#if defined(__x86_64__)
                                  "avx2", "avx512", "avx512_bf16",
#endif
                                  nullptr};

bool supported(const char* name, const CpuFeatures& has) {
  if (std::strcmp(name, "generic") == 0) return true;
  if (std::strcmp(name, "avx2") == 0) return has.avx2 && has.fma && has.f16c;
  const bool avx512 =
      has.avx2 && has.fma && has.f16c && has.avx512f && has.avx512bw && has.avx512vl && has.avx512dq;
  if (std::strcmp(name, "avx512") == 0) return avx512;
  if (std::strcmp(name, "avx512_bf16") == 0) return avx512 && has.avx512_bf16;
  return false;
}

// A level that rounds activations is used when asked for, and only then.
bool asked_only(const char* name) { return std::strcmp(name, "avx512_bf16") == 0; }

std::string supported_names(bool with_asked_only) {
  const CpuFeatures has = cpu_features();
  std::string list;
  for (const char* const* name = kNames; *name != nullptr; ++name) {
    if (!supported(*name, has) || (asked_only(*name) && !with_asked_only)) continue;
    list += (list.empty() ? "" : ", ") + std::string(*name);
  }
  return list;
}

struct Choice {
  const KernelTable* table;
  std::string reason;
};

Choice choose() {
  const char* forced = std::getenv("TWOFOLD_ISA");
  if (forced != nullptr && *forced != '\0') {
    const KernelTable* table = table_for_level(forced);
    if (table == nullptr) {
      throw std::invalid_argument("TWOFOLD_ISA=" + std::string(forced) + ": expected one of " +
                                  supported_names(true) +
                                  " (what this CPU can run); unset it to let Twofold choose");
    }
    return {table, "TWOFOLD_ISA=" + std::string(forced)};
  }
  const KernelTable* best = generic_level();
  for (const char* const* name = kNames; *name != nullptr; ++name) {
    const KernelTable* table = asked_only(*name) ? nullptr : table_for_level(*name);
    if (table != nullptr) best = table;
  }
  return {best, "best of " + supported_names(false) + " on this CPU"};
}

// Immutable once made. A failed choice throws and is tried again by the next caller.
const Choice& choice() {
  static const Choice made = choose();
  return made;
}

}  // namespace

CpuFeatures cpu_features() {
  CpuFeatures has{};
#if defined(__x86_64__)
  uint32_t a = 0, b = 0, c = 0, d = 0;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = ymm && (state & 0xe0) == 0xe0,
             tiles = (state & 0x60000) == 0x60000;
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    has.fma = ymm && (c >> 12 & 1u);
    has.f16c = ymm && (c >> 29 & 1u);
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    const uint32_t subleaves = a;
    has.avx2 = ymm && (b >> 5 & 1u);
    has.avx512f = zmm && (b >> 16 & 1u);
    has.avx512dq = zmm && (b >> 17 & 1u);
    has.avx512bw = zmm && (b >> 30 & 1u);
    has.avx512vl = zmm && (b >> 31 & 1u);
    has.avx512_vnni = zmm && (c >> 11 & 1u);
    has.amx_bf16 = tiles && (d >> 22 & 1u);
    has.amx_tile = tiles && (d >> 24 & 1u);
    has.amx_int8 = tiles && (d >> 25 & 1u);
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) has.avx512_bf16 = zmm && (a >> 5 & 1u);
  }
#endif
  return has;
}

const KernelTable* table_for_level(const char* name) {
  if (!supported(name, cpu_features())) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(name, "avx2") == 0) return avx2_level();
  if (std::strcmp(name, "avx512") == 0) return avx512_level();
  if (std::strcmp(name, "avx512_bf16") == 0) return avx512_bf16_level();
#endif
  return generic_level();
}

const char* const* level_names() { return kNames; }

const KernelTable& kernel_table() { return *choice().table; }

const char* kernel_table_reason() { return choice().reason.c_str(); }

}  // namespace twofold::kernels
