// The levels compiled into this library. Each function lives in the file of its level and only hands out a
// pointer; dispatch.cpp alone decides which may be called.
#pragma once
#include "twofold/kernels.h"

namespace twofold::kernels {
const KernelTable* generic_level();
#if defined(__x86_64__)
const KernelTable* avx2_level();
const KernelTable* avx512_level();
const KernelTable* avx512_bf16_level();
#endif
}  // namespace twofold::kernels
