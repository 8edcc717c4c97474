// AVX-VNNI (256-bit dpbusd without AVX-512): products of q8 activations with packed integer weights. A tile
// is a whole panel (four vectors of 8 rows) x up to 2 tokens or half of one x up to 6.
#include "avx2/integer_vector.h"
#include "sums_of_32.h"

namespace twofold::kernels {
namespace {

struct AvxVnni : Avx2Integer {
  template <int kBits>
  struct Dot : SumsOf32<AvxVnni> {
    static constexpr int tokens(int pieces) { return pieces == 2 ? 4 : 6; }
    static constexpr int vectors(int tokens, int /*pieces*/) { return tokens <= 2 ? 4 : 2; }
    static constexpr int held(int /*pieces*/) { return 1; }
    static constexpr int unpack_tiles(int /*codes*/) { return kBits == 8 ? 0 : 2; }
    static void add(Sum& sum, Weights w, I values) { sum = _mm256_dpbusd_avx_epi32(sum, w, values); }
  };

  template <class Format>
  struct Four : FourOf32<AvxVnni, Format, 1> {};

  template <int kBits>
  struct ChannelDot : ChannelOf32<AvxVnni> {
    static constexpr int kTokens = 6;
    static constexpr int vectors(int tokens) { return tokens <= 2 ? 4 : 2; }
    static void add(I& sum, I w, I values) { sum = _mm256_dpbusd_avx_epi32(sum, w, values); }
  };
};

constexpr KernelTable kPart = integer_part<AvxVnni>();

}  // namespace

const KernelTable* avx_vnni_integer() { return &kPart; }

}  // namespace twofold::kernels
