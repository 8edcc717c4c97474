// AVX-512 (F, BW, VL, DQ). 16 partial sums per dot product; tiles of 4 weight rows x up to 6 tokens use 29 registers, those
// of 32 packed rows x up to 12 tokens 27.
#define TWOFOLD_VECTOR_BYTES 64
#include "avx512/vector.h"
#include "encode.h"
#include "packed_float.h"
#include "sampling_lanes.h"
#include "simd_delta.h"
#include "unpack_panel.h"

namespace twofold::kernels {
namespace {

constexpr DeltaKernels kDelta = Delta<Avx512>::kernels();

constexpr KernelTable make_part() {
  KernelTable part = Simd<Avx512>::part();
  PackedFloat<Avx512>::add_all(part);
  Encode<Avx512>::add_all(part);
  add_unpacking<Avx512, false>(part);
  part.sampling = &SamplingLanes::kKernels;
  part.delta = &kDelta;
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* avx512_level() { return &kPart; }

}  // namespace twofold::kernels
