// AVX-512 VNNI: products of q8 activations with packed integer weights.
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = {};

}  // namespace

const KernelTable* avx512_vnni_integer() { return &kPart; }

}  // namespace twofold::kernels
