// Composes the levels from their parts and chooses one: what this build has, the CPU can run and the operating system
// enables, unless TWOFOLD_ISA decides.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch_measured.h"
#include "levels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twofold::kernels {
namespace {

using Part = const KernelTable* (*)();
using Supported = bool (*)(const CpuFeatures&);

struct Level {
  const char* name;
  Supported supported;
  Part parts[3];  // later ones win
};

bool has_avx2(const CpuFeatures& has) { return has.avx2 && has.fma && has.f16c; }
bool has_avx512(const CpuFeatures& has) {
  return has_avx2(has) && has.avx512f && has.avx512bw && has.avx512vl && has.avx512dq;
}

// Linux hands out the tiles' state only to processes that ask.
bool tiles_permitted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Best last. A level is composed of all levels before it that can be called.
constexpr Level kLevels[] = {
    {"generic", [](const CpuFeatures&) { return true; }, {generic_level, generic_packed, generic_delta}},
    {"avx2", has_avx2, {avx2_level, avx2_integer}},
    {"avx_vnni", [](const CpuFeatures& has) { return has_avx2(has) && has.avx_vnni; }, {avx_vnni_integer}},
    {"avx512", has_avx512, {avx512_level}},
    {"avx512_vnni",
     [](const CpuFeatures& has) { return has_avx512(has) && has.avx512_vnni; },
     {avx512_vnni_integer}},
    {"avx512_bf16",
     [](const CpuFeatures& has) { return has_avx512(has) && has.avx512_bf16; },
     {avx512_bf16_level}},
    {"amx",
     [](const CpuFeatures& has) {
       return has_avx512(has) && has.avx512_vnni && has.avx512_bf16 && has.amx_tile && has.amx_int8 &&
              has.amx_bf16 && tiles_permitted();
     },
     {amx_level}},
};
constexpr int kNumLevels = static_cast<int>(sizeof kLevels / sizeof kLevels[0]);

template <class Entry>
void take(Entry& into, Entry from) {
  if (from != nullptr) into = from;
}

// The table of every level that this CPU can run and this build has.
struct Tables {
  KernelTable tables[kNumLevels];
  bool supported[kNumLevels];
  bool left_out[kNumLevels];  // the CPU can run it, this build lacks it

  Tables() {
    const CpuFeatures has = cpu_features();
    KernelTable table;
    for (int l = 0; l < kNumLevels; ++l) {
      const bool runs = kLevels[l].supported(has);
      supported[l] = runs && kLevels[l].parts[0]() != nullptr;
      left_out[l] = runs && !supported[l];
      if (!supported[l]) continue;
      table.name = kLevels[l].name;
      for (const Part part : kLevels[l].parts) {
        if (part != nullptr) add_part(*part(), kLevels[l].name, table);
      }
      tables[l] = table;
    }
  }
};

const Tables& all_tables() {
  static const Tables tables;
  return tables;
}

std::string names_of(const bool (&chosen)[kNumLevels]) {
  std::string list;
  for (int l = 0; l < kNumLevels; ++l) {
    if (chosen[l]) list += (list.empty() ? "" : ", ") + std::string(kLevels[l].name);
  }
  return list;
}

struct Choice {
  KernelTable table;
  std::string reason;
};

Choice choose() {
  const char* forced = std::getenv("TWOFOLD_ISA");
  if (forced != nullptr && *forced != '\0') {
    const KernelTable* table = table_for_level(forced);
    if (table == nullptr) {
      const std::string left_out = names_of(all_tables().left_out);
      throw std::invalid_argument(
          "TWOFOLD_ISA=" + std::string(forced) + ": expected one of " + names_of(all_tables().supported) +
          " (what this CPU and this build can run); unset it to let Twofold choose" +
          (left_out.empty() ? "" : ", or compile " + left_out + " too: TWOFOLD_LEVELS=all make quick-build"));
    }
    return {*table, "TWOFOLD_ISA=" + std::string(forced)};
  }
  std::vector<const KernelTable*> levels;
  for (int l = 0; l < kNumLevels; ++l) {
    if (all_tables().supported[l]) levels.push_back(&all_tables().tables[l]);
  }
  Choice best{*levels.back(), "best of " + names_of(all_tables().supported) + " on this CPU"};
  const std::string left_out = names_of(all_tables().left_out);
  if (!left_out.empty()) best.reason += "; not compiled: " + left_out;
  const std::string measured = choose_by_measurement(levels, best.table);
  if (!measured.empty()) best.reason += "; measured the fastest: " + measured;
  return best;
}

// Immutable once made. A failed choice throws and is tried again by the next caller.
const Choice& choice() {
  static const Choice made = choose();
  return made;
}

}  // namespace

void add_part(const KernelTable& part, const char* level, KernelTable& table) {
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    RowKernels& rows = table.row_kernels[dtype];
    take(rows.matmul, part.row_kernels[dtype].matmul);
    take(rows.weighted_sum, part.row_kernels[dtype].weighted_sum);
    take(rows.widen, part.row_kernels[dtype].widen);
  }
  take(table.tile_attention, part.tile_attention);
  take(table.rmsnorm, part.rmsnorm);
  take(table.rope, part.rope);
  take(table.softmax_exp, part.softmax_exp);
  take(table.axpy, part.axpy);
  take(table.multiply, part.multiply);
  take(table.relu_sum, part.relu_sum);
  take(table.bf16_to_f32, part.bf16_to_f32);
  take(table.f32_to_bf16, part.f32_to_bf16);
  take(table.f32_to_i8, part.f32_to_i8);
  take(table.f32_to_fp8, part.f32_to_fp8);
  for (int f = 0; f < kNumWeightFormats; ++f) {
    if (part.formats[f].matmul == nullptr) continue;
    table.formats[f] = part.formats[f];
    table.formats[f].level = level;
  }
  for (int kind = 0; kind < kNumActivationKinds; ++kind) take(table.encode[kind], part.encode[kind]);
  for (int kind = 0; kind < kNumExpertActivations; ++kind) take(table.gated[kind], part.gated[kind]);
  for (int f = 0; f < kNumWeightFormats; ++f) take(table.unpack[f], part.unpack[f]);
  take(table.read_all, part.read_all);
  take(table.sampling, part.sampling);
  take(table.delta, part.delta);
}

CpuFeatures cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto yes = [](int supported) { return supported != 0; };
  return {.avx2 = yes(__builtin_cpu_supports("avx2")),
          .fma = yes(__builtin_cpu_supports("fma")),
          .f16c = yes(__builtin_cpu_supports("f16c")),
          .avx_vnni = yes(__builtin_cpu_supports("avxvnni")),
          .avx512f = yes(__builtin_cpu_supports("avx512f")),
          .avx512bw = yes(__builtin_cpu_supports("avx512bw")),
          .avx512vl = yes(__builtin_cpu_supports("avx512vl")),
          .avx512dq = yes(__builtin_cpu_supports("avx512dq")),
          .avx512_vnni = yes(__builtin_cpu_supports("avx512vnni")),
          .avx512_bf16 = yes(__builtin_cpu_supports("avx512bf16")),
          .amx_tile = yes(__builtin_cpu_supports("amx-tile")),
          .amx_int8 = yes(__builtin_cpu_supports("amx-int8")),
          .amx_bf16 = yes(__builtin_cpu_supports("amx-bf16"))};
#else
  return {};
#endif
}

const KernelTable* table_for_level(const char* name) {
  for (int l = 0; l < kNumLevels; ++l) {
    if (std::strcmp(name, kLevels[l].name) == 0) {
      return all_tables().supported[l] ? &all_tables().tables[l] : nullptr;
    }
  }
  return nullptr;
}

bool level_left_out(const char* name) {
  for (int l = 0; l < kNumLevels; ++l) {
    if (std::strcmp(name, kLevels[l].name) == 0) return all_tables().left_out[l];
  }
  return false;
}

const char* const* level_names() {
  static const char* names[kNumLevels + 1] = {};  // the last stays null
  static const bool filled = [] {
    for (int l = 0; l < kNumLevels; ++l) names[l] = kLevels[l].name;
    return true;
  }();
  static_cast<void>(filled);
  return names;
}

const KernelTable& kernel_table() { return choice().table; }

const char* kernel_table_reason() { return choice().reason.c_str(); }

}  // namespace twofold::kernels
