// fp8: e4m3 bytes with a separate grid of f32 scales, one for 128 x 128 weights. Made by checkpoints' authors
// only.
//
//   source  plain e4m3 bytes
//   panel   128 columns: f32 scale[32]; 32 slices of e4m3 bytes
//   weight = scale * value
#pragma once
#include "panel.h"

namespace twofold::kernels::formats {

struct GridScale {
  static constexpr int kHeaderBytes = 4 * kPanelRows;
};

struct FP8 : Panel<128, GridScale, 8> {
  static constexpr const char *kName = "fp8", *kGguf = "";
  static constexpr int kBlockColumns = 1, kBlockBytes = 1, kScaleGrid = 128;
  static constexpr int kSliceColumns = 4;
  static constexpr uint8_t kExponent = 0x7f;  // as in plain.h; e4m3 has a NaN and no infinities
  static constexpr float kFactor =
      256.0f;  // vectors widen the bits in the place of an f16: 2^-8 of the value
  static constexpr ActivationKind kDeviceActivation = ActivationKind::kBF16;

  TWOFOLD_HD static float weight(uint32_t bits) { return float_of_e4m3(bits); }
  static float value(uint32_t bits) {
    return (bits & 0x7fu) == 0x7fu ? float_of_bits(0x7fc00000u) : weight(bits);
  }
  template <class V>
  static void widen(const uint8_t* p, typename V::F* w) {
    V::load_fp8_slice(p, w);
  }
  // For whole columns in a buffer.
  template <class V>
  static void widen_many(const uint8_t* p, typename V::F* w) {
    V::widen_fp8_slice(p, w);
  }
};

}  // namespace twofold::kernels::formats
