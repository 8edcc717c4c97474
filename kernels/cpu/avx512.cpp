// AVX-512 (F, BW, VL, DQ). 16 partial sums per dot product; tiles of 4 weight rows x up to 6 tokens use 29
// registers.
#include "avx512_vector.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kTable = Simd<Avx512>::table("avx512");

}  // namespace

const KernelTable* avx512_level() { return &kTable; }

}  // namespace twofold::kernels
