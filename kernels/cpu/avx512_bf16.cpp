// AVX-512 with BF16: products of packed bfloat16 weights with bfloat16 activations. Row-major products keep
// float32 activations, as on the other levels.
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = {};

}  // namespace

const KernelTable* avx512_bf16_level() { return &kPart; }

}  // namespace twofold::kernels
