// AVX-512 (F, BW, VL, DQ). 16 partial sums per dot product; tiles of 4 weight rows x up to 6 tokens use 29
// registers.
#include "avx512/vector.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = Simd<Avx512>::part();

}  // namespace

const KernelTable* avx512_level() { return &kPart; }

}  // namespace twofold::kernels
