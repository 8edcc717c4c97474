// All formats: the order is that of WeightFormat's numbers. A new one is a header of its own and its two
// lines here.
#pragma once
#include "below_4_bits/iq1_m.h"
#include "below_4_bits/iq1_s.h"
#include "below_4_bits/iq2_s.h"
#include "below_4_bits/iq2_xs.h"
#include "below_4_bits/iq2_xxs.h"
#include "below_4_bits/iq3_s.h"
#include "below_4_bits/iq3_xxs.h"
#include "below_4_bits/tq1_0.h"
#include "below_4_bits/tq2_0.h"
#include "fp8.h"
#include "int4.h"
#include "int4_channel.h"
#include "int8.h"
#include "int8_channel.h"
#include "iq4_nl.h"
#include "iq4_xs.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "plain.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_0.h"
#include "q4_1.h"
#include "q4_k.h"
#include "q5_0.h"
#include "q5_1.h"
#include "q5_k.h"
#include "q6_k.h"
#include "q8_0.h"

#define TWOFOLD_WEIGHT_FORMATS(X) \
  X(F32)                          \
  X(F16)                          \
  X(BF16)                         \
  X(FP8)                          \
  X(Q8_0)                         \
  X(Q4_0)                         \
  X(Q4_K)                         \
  X(Q5_K)                         \
  X(Q6_K)                         \
  X(Int8)                         \
  X(Int4)                         \
  X(Int8_Channel)                 \
  X(Int4_Channel)                 \
  X(MXFP4)                        \
  X(IQ4_NL)                       \
  X(Q4_1)                         \
  X(Q5_0)                         \
  X(Q5_1)                         \
  X(Q2_K)                         \
  X(Q3_K)                         \
  X(IQ4_XS)                       \
  X(NVFP4)                        \
  X(IQ3_XXS)                      \
  X(IQ2_XXS)                      \
  X(IQ2_XS)                       \
  X(IQ2_S)                        \
  X(IQ3_S)                        \
  X(IQ1_S)                        \
  X(IQ1_M)                        \
  X(TQ1_0)                        \
  X(TQ2_0)

namespace twofold::kernels {

enum class WeightFormat : uint8_t {
#define TWOFOLD_FORMAT(name) k##name,
  TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT
};

#define TWOFOLD_FORMAT(name) +1
inline constexpr int kNumWeightFormats = 0 TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT);
#undef TWOFOLD_FORMAT

// The struct of a format's number, and the number of a struct.
template <WeightFormat>
struct FormatOf;
template <class Format>
inline constexpr WeightFormat kNumberOf = WeightFormat{};
#define TWOFOLD_FORMAT(name)               \
  template <>                              \
  struct FormatOf<WeightFormat::k##name> { \
    using type = formats::name;            \
  };                                       \
  template <>                              \
  inline constexpr WeightFormat kNumberOf<formats::name> = WeightFormat::k##name;
TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT

// use(struct of the format) for all, in order.
template <class Use>
constexpr void for_each_format(Use use) {
#define TWOFOLD_FORMAT(name) use(formats::name());
  TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT
}

// use(struct of the format) for one.
template <class Use>
TWOFOLD_HD constexpr auto with_format(WeightFormat format, Use use) {
  switch (format) {
#define TWOFOLD_FORMAT(name)  \
  case WeightFormat::k##name: \
    return use(formats::name());
    TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT
  }
  __builtin_unreachable();
}

}  // namespace twofold::kernels
