// AVX-512 VNNI: products of q8 activations with packed integer weights.
#include "avx512/vnni_vector.h"
#include "integer_products.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = integer_part<Avx512Vnni>();

}  // namespace

const KernelTable* avx512_vnni_integer() { return &kPart; }

}  // namespace twofold::kernels
