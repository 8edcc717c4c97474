// AVX2: products of q8 activations with packed integer weights. maddubs adds two products of bytes to 16 bits
// and saturates; what is summed there must fit until madd widens it, which multiplies by the integers of a
// scale in the same instruction:
//
//   4 bits   8 slices of a subblock: 16 * 15 * 127 < 2^15
//   5 bits   4 slices: 8 * 31 * 127 < 2^15; so a subblock is two sums
//   2, 3     4 slices (a half, which has a scale of its own)
//   6 bits   4 slices (a half): 8 * 32 * 127 < 2^15, the offset of 32 taken away;
//            on the way sums may wrap around, only the result has to fit
//   8 bits   as two nibbles; what a table of signed bytes stands for, as its magnitude
#include "avx2/integer_vector.h"
#include "integer_terms.h"
#include "sums_of_32.h"

namespace twofold::kernels {
namespace {

// A table less 128.
template <class Codes>
struct Signed {
  struct Table {
    uint8_t entries[16];
  };
  static constexpr Table made() {
    Table table{};
    for (int i = 0; i < 16; ++i) table.entries[i] = Codes::kTable[i] ^ 0x80u;
    return table;
  }
  static constexpr Table kMade = made();
  static constexpr const uint8_t* kTable = kMade.entries;
};

struct Avx2 : Avx2Integer {
  // GCC would add products to each other first, for which 16 registers are too few.
  static I in_order(I sum) {
    __asm__("" : "+x"(sum));
    return sum;
  }

  template <int kBits>
  struct ChannelDot;
  struct FloatScaled;
  struct LookedUp;
  template <class Format>
  struct Four;

  // 16-bit sums of pairs.
  template <int kBits>
  struct Dot {
    using Sum = I;
    using Weights = I;
    using Total = I;
    static constexpr bool kIntegerScales = true;
    static constexpr int kPieces = kBits == 5 ? 2 : 1;
    static constexpr int kStoredVectors = 1;
    static constexpr int tokens(int /*pieces*/) { return kBits == 3 ? 3 : 4; }
    static constexpr int vectors(int tokens, int /*pieces*/) { return tokens <= 2 && kBits >= 4 ? 4 : 2; }
    static constexpr int held(int /*pieces*/) { return 1; }
    static constexpr int unpack_tiles(int /*codes*/) { return kBits == 3 ? 2 : 3; }

    template <int kZero, bool kHalves>
    static void zeros(const int8_t* q, const int32_t*, int32_t* zero) {
      if constexpr (kZero != 0) SubblockTerms::of_lanes<kZero, kHalves>(q, zero);
      if constexpr (kZero == 0) __builtin_memset(zero, 0, kHalves ? 64 : 32);
    }
    static Sum begin(const int32_t* zero) { return _mm256_set1_epi32(*zero); }
    static Sum none() { return _mm256_setzero_si256(); }
    static Weights weights(I bytes) { return bytes; }
    static Weights load(const uint8_t* stored) { return Avx2Integer::load(stored); }
    static void store(uint8_t* stored, Weights w) { Avx2Integer::store(stored, w); }
    static void add(Sum& sum, Weights w, I values) {
      sum = in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, values)));
    }

    static I one() { return _mm256_set1_epi16(1); }
    // Numbers of eight rows, each as two integers of 16 bits.
    using Numbers = Dot;
    static constexpr int kLanes = Avx2Integer::kLanes;
    static I signed_bytes(const uint8_t* p) { return _mm256_srai_epi16(high_bytes(p), 8); }
    static I high_bytes(const uint8_t* p) {
      const I high = _mm256_setr_epi64x(static_cast<int64_t>(0x0180018000800080), 0x0380038002800280,
                                        0x0580058004800480, 0x0780078006800680);
      return _mm256_shuffle_epi8(_mm256_set1_epi64x(load_as<int64_t>(p)), high);
    }
    static I unsigned_bytes(const uint8_t* p) {
      const I low = _mm256_setr_epi64x(
          static_cast<int64_t>(0x8001800180008000u), static_cast<int64_t>(0x8003800380028002u),
          static_cast<int64_t>(0x8005800580048004u), static_cast<int64_t>(0x8007800780068006u));
      return _mm256_shuffle_epi8(_mm256_set1_epi64x(load_as<int64_t>(p)), low);
    }
    // Scales of byte `half` of each row's two: low nibbles.
    static I pair_low(const uint8_t* p, int half) {
      const I rows = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const I at = _mm256_setr_epi64x(
          static_cast<int64_t>(0x8002800280008000u), static_cast<int64_t>(0x8006800680048004u),
          static_cast<int64_t>(0x800a800a80088008u), static_cast<int64_t>(0x800e800e800c800cu));
      return _mm256_shuffle_epi8(low_nibbles(rows),
                                 half == 0 ? at : _mm256_add_epi8(at, _mm256_set1_epi16(1)));
    }
    static Total first(Sum sum, I c) { return _mm256_madd_epi16(sum, c); }
    static Total next(Total total, Sum sum, I c) {
      return _mm256_add_epi32(total, _mm256_madd_epi16(sum, c));
    }
    static F value(Total total) { return to_float(total); }
  };
};

// 4 bits: each half's sum is widened by itself.
struct Avx2::FloatScaled : Avx2::Dot<4> {
  using Total = F;
  using Numbers = Avx2;
  static F widened(Sum sum) { return to_float(_mm256_madd_epi16(sum, one())); }
  static Total first(Sum sum, F c) { return mul(widened(sum), c); }
  static Total next(Total total, Sum sum, F c) { return fma(widened(sum), c, total); }
  static F value(Total total) { return total; }
};

template <>
struct Avx2::Dot<8> {
  struct Sum {
    I low, high;
  };
  using Weights = Sum;
  using Total = I;
  static constexpr bool kIntegerScales = false;
  static constexpr int kPieces = 1;
  static constexpr int kStoredVectors = 2;
  static constexpr int tokens(int /*pieces*/) { return 6; }
  static constexpr int vectors(int tokens, int /*pieces*/) { return tokens == 1 ? 4 : tokens == 2 ? 2 : 1; }
  static constexpr int held(int /*pieces*/) { return 0; }
  static constexpr int unpack_tiles(int /*codes*/) { return 2; }

  template <int kZero, bool kHalves>
  static void zeros(const int8_t* q, const int32_t*, int32_t* zero) {
    static_assert(kZero % 16 == 0 && !kHalves, "the high nibbles begin with it");
    SubblockTerms::of_lanes<kZero / 16, false>(q, zero);
  }
  static Sum begin(const int32_t* zero) { return {_mm256_setzero_si256(), _mm256_set1_epi32(*zero)}; }
  static Sum none() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Weights weights(I bytes) { return {low_nibbles(bytes), high_nibbles(bytes)}; }
  static Weights load(const uint8_t* stored) {
    return {Avx2Integer::load(stored), Avx2Integer::load(stored + kBytes)};
  }
  static void store(uint8_t* stored, Weights w) {
    Avx2Integer::store(stored, w.low);
    Avx2Integer::store(stored + kBytes, w.high);
  }
  static void add(Sum& sum, Weights w, I values) {
    sum.low = in_order(_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low, values)));
    sum.high = in_order(_mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high, values)));
  }
  struct One {};
  static One one() { return {}; }
  static Total first(Sum sum, One) {
    return _mm256_add_epi32(_mm256_madd_epi16(sum.low, _mm256_set1_epi16(1)),
                            _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16)));
  }
  static Total next(Total total, Sum, One) { return total; }
  static F value(Total total) { return to_float(total); }
};

// Sums for table codes: magnitudes times activations that have the codes' signs. Two products, at most 2 * 127 * 127,
// fit 16 bits; they are widened immediately.
struct Avx2::LookedUp : SumsOf32<Avx2> {
  static constexpr int tokens(int /*pieces*/) { return 6; }
  static constexpr int vectors(int tokens, int /*pieces*/) { return tokens <= 2 ? 4 : 2; }
  static constexpr int held(int /*pieces*/) { return 1; }
  static constexpr int unpack_tiles(int /*codes*/) { return 2; }

  template <int kZero, bool kHalves>
  static void zeros(const int8_t*, const int32_t*, int32_t*) {
    static_assert(kZero == 128, "what codes stand for fits a signed byte");
  }
  static Sum begin(const int32_t*) { return none(); }
  template <class Codes>
  static Weights look_up(I codes) {
    return Avx2Integer::look_up<Signed<Codes>>(codes);
  }
  static void add(Sum& sum, Weights w, I values) {
    const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(values, w));
    sum = in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
};

// For channel_products.h: as Dot, the sums of each subblock widened at its end.
template <int kBits>
struct Avx2::ChannelDot {
  using Of = Dot<kBits>;
  using Run = typename Of::Sum;
  using Weights = typename Of::Weights;
  static constexpr int kTokens = kBits == 8 ? 6 : 3;
  static constexpr int vectors(int tokens) { return Of::vectors(tokens, 1); }
  static Weights weights(I bytes) { return Of::weights(bytes); }
  static Run begin(I) { return Run{}; }
  static void add(Run& subblock, Weights w, I values) { Of::add(subblock, w, values); }
  static I end(I sum, Run subblock) { return _mm256_add_epi32(sum, Of::first(subblock, Of::one())); }
};

// For four_codes.h: two of the four subblocks are multiplied as four times their codes.
template <class Format>
struct Avx2::Four {
  static constexpr bool kThird = Format::kPlanes > 0;
  static constexpr int kVectors = kThird ? 1 : 2;  // more do not fit the registers
  // A signed scale is the upper byte of 16 bits.
  static constexpr int kSubUp = kThird ? 8 : 0;
  static constexpr int kUp[4] = {kSubUp, kSubUp + (kThird ? 0 : 2), kSubUp + (kThird ? 2 : 0), kSubUp + 2};

  // Two sums of 16 bits.
  static int32_t zero(int subblock, int32_t lanes) {
    const uint32_t v = static_cast<uint32_t>(lanes);
    const int up = kUp[subblock] - kSubUp;
    return static_cast<int32_t>((v << up & 0xffffu) | (v >> 16 << (16 + up)));
  }
  // Both subblocks of `pair`, whose codes `low` and, of the third bits, `plane` hold.
  static void unpack(I low, I plane, int slice, int pair, I (&w)[2]) {
    if constexpr (kThird) {
      const I middle = moved<2>(low);
      const I first = slice % 2 == 0 ? moved<-2>(plane) : moved<2>(plane);
      const I second = slice % 2 == 0 ? moved<-1>(plane) : moved<3>(plane);
      w[0] = pair == 0 ? with_bits<4>(bits<3>(low), first) : with_bits<16>(bits<12>(middle), first);
      w[1] =
          pair == 0 ? with_bits<4>(bits<3>(middle), second) : with_bits<16>(bits<12>(moved<4>(low)), second);
    } else {
      const I both = pair == 0 ? low : moved<4>(low);
      w[0] = bits<3>(both), w[1] = bits<12>(both);
    }
  }
  static I scale_of(const uint8_t* block, int subblock, int half, int g) {
    if constexpr (!kThird) return numbers_of<Dot<2>, Format>(block, subblock, half, g);
    return Dot<3>::high_bytes(block + Format::sub_at(subblock, half) + kLanes * g);
  }

  static void sums(const uint8_t* block, int group, int g0, const int8_t* x, const int32_t* zero,
                   F (&f)[4][kVectors]) {
    const uint8_t* slices = block + Format::slices_at(0) + group * Format::kUnitBytes + kBytes * g0;
    const uint8_t* planes = block + Format::planes_at(0) + group * Format::kUnitBytes + kBytes * g0;
    I total[4][kVectors];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      I sum[4][kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int slice = 4 * half + i;
        I low[kVectors], plane[kVectors], w[kVectors][2];
#pragma GCC unroll 2
        for (int g = 0; g < kVectors; ++g) {
          low[g] = load(slices + kSliceBytes * slice + kBytes * g);
          if constexpr (kThird) plane[g] = load(planes + Format::plane_at(0, slice) + kBytes * g);
        }
#pragma GCC unroll 4
        for (int subblock = 0; subblock < 4; ++subblock) {
          const I values = broadcast(x + 32 * subblock + 4 * slice);
#pragma GCC unroll 2
          for (int g = 0; g < kVectors; ++g) {
            if (subblock % 2 == 0) unpack(low[g], plane[g], slice, subblock / 2, w[g]);
            I products = _mm256_maddubs_epi16(w[g][subblock % 2], values);
            if (i > 0) {
              products = _mm256_add_epi16(sum[subblock][g], products);
            } else if constexpr (kThird) {
              products = _mm256_add_epi16(same(zero[2 * subblock + half]), products);
            }
            sum[subblock][g] = in_order(products);
          }
        }
      }
#pragma GCC unroll 4
      for (int subblock = 0; subblock < 4; ++subblock) {
#pragma GCC unroll 2
        for (int g = 0; g < kVectors; ++g) {
          const I scaled =
              _mm256_madd_epi16(sum[subblock][g], scale_of(block, 4 * group + subblock, half, g0 + g));
          total[subblock][g] = half == 0 ? scaled : _mm256_add_epi32(total[subblock][g], scaled);
          f[subblock][g] = to_float(total[subblock][g]);
        }
      }
    }
  }
};

constexpr KernelTable kPart = integer_part<Avx2>();

}  // namespace

const KernelTable* avx2_integer() { return &kPart; }

}  // namespace twofold::kernels
