// Sampling over vectors of 64 bytes.
#define TWOFOLD_VECTOR_BYTES 64
#include "sampling_lanes.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = SamplingLanes::part();

}  // namespace

const KernelTable* avx512_sampling() { return &kPart; }

}  // namespace twofold::kernels
