// f32, f16 and bf16: rows of elements, read as they are. A panel block is one slice: of each row as many
// consecutive elements as fill 4 bytes.
//
//   f32        1 column : f32[32]
//   f16, bf16  2 columns: u16[32][2]
#pragma once
#include "panel.h"

namespace twofold::kernels::formats {

template <int kElementBytes, ActivationKind kOnDevice>
struct Plain {
  static constexpr int kBlockColumns = 1, kBlockBytes = kElementBytes;
  static constexpr int kSliceColumns = 4 / kElementBytes, kPanelColumns = kSliceColumns;
  static constexpr int kHeaderBytes = 0, kPanelBytes = kSliceBytes;
  static constexpr int kScaleGrid = 0, kRowHeadBytes = 0, kSeparateBytes = 0;
  static constexpr float kFactor = 1.0f;  // a weight divided by what widen() gives
  static constexpr ActivationKind kDeviceActivation =
      kOnDevice;  // what a device's decode kernels multiply it with
};

// kExponent: the bits of an element that are all set in infinities and NaNs. weight(bits): an element. widen<V>(p, w): a
// vector of rows of one slice, an F for each of its columns.
struct F32 : Plain<4, ActivationKind::kF32> {
  static constexpr const char *kName = "f32", *kGguf = "F32";
  static constexpr uint32_t kExponent = 0x7f800000;
  TWOFOLD_HD static float weight(uint32_t bits) { return float_of_bits(bits); }
  static float value(uint32_t bits) { return weight(bits); }
  template <class V>
  static void widen(const uint8_t* p, typename V::F* w) {
    w[0] = V::load(reinterpret_cast<const float*>(p));
  }
  static void quantise(const float* x, const float*, uint8_t* block) { store_as(block, *x); }
};

struct F16 : Plain<2, ActivationKind::kF32> {
  static constexpr const char *kName = "f16", *kGguf = "F16";
  static constexpr uint16_t kExponent = 0x7c00;
  TWOFOLD_HD static float weight(uint32_t bits) { return float_of_f16(bits); }
  static float value(uint32_t bits) { return weight(bits); }
  template <class V>
  static void widen(const uint8_t* p, typename V::F* w) {
    V::load_f16_slice(p, w);
  }
  static void quantise(const float* x, const float*, uint8_t* block);
};

struct BF16 : Plain<2, ActivationKind::kBF16> {
  static constexpr const char *kName = "bf16", *kGguf = "BF16";
  static constexpr uint16_t kExponent = 0x7f80;
  TWOFOLD_HD static float weight(uint32_t bits) { return float_of_bf16(bits); }
  static float value(uint32_t bits) { return weight(bits); }
  template <class V>
  static void widen(const uint8_t* p, typename V::F* w) {
    V::load_bf16_slice(p, w);
  }
  static void quantise(const float* x, const float*, uint8_t* block) { store_as(block, bf16_of_float(*x)); }
};

}  // namespace twofold::kernels::formats
