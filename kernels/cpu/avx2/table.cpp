// AVX2 with FMA. 8 partial sums per dot product; tiles of 4 weight rows x up to 2 tokens use 13 of the 16 registers, those of
// 16 packed rows x up to 6 tokens 15.
#define TWOFOLD_VECTOR_BYTES 32
#include "avx2/vector.h"
#include "encode.h"
#include "packed_float.h"
#include "sampling_lanes.h"
#include "simd_delta.h"
#include "unpack_panel.h"

namespace twofold::kernels {
namespace {

constexpr DeltaKernels kDelta = Delta<Avx2>::kernels();

constexpr KernelTable make_part() {
  KernelTable part = Simd<Avx2>::part();
  PackedFloat<Avx2>::add_all(part);
  Encode<Avx2>::add_all(part);
  add_unpacking<Avx2, false>(part);
  part.sampling = &SamplingLanes::kKernels;
  part.delta = &kDelta;
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* avx2_level() { return &kPart; }

}  // namespace twofold::kernels
