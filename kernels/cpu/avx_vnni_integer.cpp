// AVX-VNNI (256-bit dpbusd without AVX-512): products of q8 activations with packed integer weights.
#include "levels.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = {};

}  // namespace

const KernelTable* avx_vnni_integer() { return &kPart; }

}  // namespace twofold::kernels
