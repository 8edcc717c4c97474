// Sampling over vectors of 32 bytes.
#define TWOFOLD_VECTOR_BYTES 32
#include "sampling_lanes.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = SamplingLanes::part();

}  // namespace

const KernelTable* avx2_sampling() { return &kPart; }

}  // namespace twofold::kernels
