// The gated delta net over vectors of AVX2 with FMA.
#include "avx2/vector.h"
#include "simd_delta.h"

namespace twofold::kernels {
namespace {

constexpr DeltaKernels kKernels = Delta<Avx2>::kernels();
constexpr KernelTable kPart = {.delta = &kKernels};

}  // namespace

const KernelTable* avx2_delta() { return &kPart; }

}  // namespace twofold::kernels
