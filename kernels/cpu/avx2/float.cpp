// AVX2: packed float weights with float32 activations, and the encoding of activations; tiles of 16 rows x up
// to 6 tokens use 15 of the 16 registers.
#include "avx2/vector.h"
#include "encode.h"
#include "packed_float.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable make_part() {
  KernelTable part;
  PackedFloat<Avx2>::add_all(part);
  Encode<Avx2>::add_all(part);
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* avx2_float() { return &kPart; }

}  // namespace twofold::kernels
