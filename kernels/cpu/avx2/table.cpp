// AVX2 with FMA. 8 partial sums per dot product; tiles of 4 weight rows x up to 2 tokens use 13 of the 16
// registers.
#include "avx2/vector.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = Simd<Avx2>::part();

}  // namespace

const KernelTable* avx2_level() { return &kPart; }

}  // namespace twofold::kernels
