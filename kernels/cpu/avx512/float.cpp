// AVX-512: packed float weights with float32 activations, and the encoding of activations; tiles of 32 rows x
// up to 12 tokens use 27 registers.
#include "avx512/vector.h"
#include "encode.h"
#include "packed_float.h"

namespace twofold::kernels {
namespace {

constexpr KernelTable make_part() {
  KernelTable part;
  PackedFloat<Avx512>::add_all(part);
  Encode<Avx512>::add_all(part);
  return part;
}
constexpr KernelTable kPart = make_part();

}  // namespace

const KernelTable* avx512_float() { return &kPart; }

}  // namespace twofold::kernels
