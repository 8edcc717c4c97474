// The parts of the levels. A part is a KernelTable with what one file supplies for
// one level; entries it leaves null (and formats without a matmul) come from the level's earlier parts or
// from the level below. Each function lives in the file of its part and only hands out a pointer, null in absent.cpp
// if this build leaves the level out; dispatch.cpp alone composes the levels and decides which may be called.
#pragma once
#include "twofold/kernels.h"

namespace twofold::kernels {
const KernelTable* generic_level();
const KernelTable* generic_packed();
const KernelTable* generic_delta();
const KernelTable* avx2_level();
const KernelTable* avx2_integer();
const KernelTable* avx_vnni_integer();
const KernelTable* avx512_level();
const KernelTable* avx512_vnni_integer();
const KernelTable* avx512_bf16_level();
const KernelTable* amx_level();

// amx_level() with its tile instructions carried out in plain code, for tests on CPUs without them. In a library of its own.
const KernelTable* amx_emulated();

// Puts a part's entries, as those of `level`, into a table.
void add_part(const KernelTable& part, const char* level, KernelTable& table);
}  // namespace twofold::kernels
