// The gated delta net over vectors of AVX-512.
#include "avx512/vector.h"
#include "simd_delta.h"

namespace twofold::kernels {
namespace {

constexpr DeltaKernels kKernels = Delta<Avx512>::kernels();
constexpr KernelTable kPart = {.delta = &kKernels};

}  // namespace

const KernelTable* avx512_delta() { return &kPart; }

}  // namespace twofold::kernels
