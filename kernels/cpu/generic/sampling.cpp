// Sampling over vectors of 16 bytes.
#define TWOFOLD_VECTOR_BYTES 16
#include "sampling_lanes.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable kPart = SamplingLanes::part();

}  // namespace

const KernelTable* generic_sampling() { return &kPart; }

}  // namespace twofold::kernels
