// AVX2: products of q8 activations with packed integer weights.
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = {};

}  // namespace

const KernelTable* avx2_integer() { return &kPart; }

}  // namespace twofold::kernels
