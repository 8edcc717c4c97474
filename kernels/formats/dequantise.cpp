// Source rows and rows of panels as float32: what every kernel is tested against.
#include "source_blocks.h"

namespace twofold::kernels {
namespace {

template <class Source>
void dequantise_blocks(const uint8_t* row, int64_t columns, float* out) {
  constexpr int kColumns = Source::Panel::kColumns;
  for (int64_t b = 0; b < columns / kColumns; ++b)
    Source::dequantise(row + b * Source::kBytes, out + b * kColumns);
}

// `weight(block, run, u, i)`: the weight that is stored as u[i].
template <class Panel, class Weight>
void unpack_blocks(const uint8_t* panel, int row, int64_t columns, float* out, const Weight& weight) {
  for (int64_t k = 0; k < columns; k += kRunColumns) {
    const uint8_t* block = panel + k / Panel::kColumns * Panel::kBytes;
    const int run = static_cast<int>(k % Panel::kColumns / kRunColumns);
    uint8_t u[kRunColumns];
    Panel::values(block, row, run, u);
    for (int i = 0; i < kRunColumns; ++i) out[k + i] = weight(block, run, static_cast<float>(u[i]), i);
  }
}

template <class Panel>
void unpack_scaled(const uint8_t* panel, int row, int64_t columns, float* out) {
  unpack_blocks<Panel>(panel, row, columns, out, [row](const uint8_t* block, int, float u, int) {
    return Panel::scale(block, row) * (u - static_cast<float>(Panel::kOffset));
  });
}

template <class Panel>
void unpack_k(const uint8_t* panel, int row, int64_t columns, float* out) {
  unpack_blocks<Panel>(panel, row, columns, out, [row](const uint8_t* block, int run, float u, int) {
    return Panel::d(block, row) * Panel::scale(block, row, run) * u -
           Panel::dmin(block, row) * Panel::min(block, row, run);
  });
}

}  // namespace

void dequantise_row(WeightFormat format, const void* row, const float* scales, int64_t columns, float* out) {
  const uint8_t* bytes = static_cast<const uint8_t*>(row);
  switch (format) {
    case WeightFormat::kF32:
      std::memcpy(out, row, static_cast<size_t>(4 * columns));
      return;
    case WeightFormat::kF16:
      for (int64_t k = 0; k < columns; ++k) out[k] = f16_at(bytes + 2 * k);
      return;
    case WeightFormat::kBF16:
      for (int64_t k = 0; k < columns; ++k) out[k] = float_of_bf16(load_as<uint16_t>(bytes + 2 * k));
      return;
    case WeightFormat::kFP8:
      for (int64_t k = 0; k < columns; ++k) out[k] = float_of_e4m3(bytes[k]) * scales[k / 128];
      return;
    case WeightFormat::kQ8_0:
      return dequantise_blocks<SourceQ8_0>(bytes, columns, out);
    case WeightFormat::kQ4_0:
      return dequantise_blocks<SourceQ4_0>(bytes, columns, out);
    case WeightFormat::kQ4_K:
      return dequantise_blocks<SourceQ4_K>(bytes, columns, out);
    case WeightFormat::kQ5_K:
      return dequantise_blocks<SourceQ5_K>(bytes, columns, out);
    case WeightFormat::kQ6_K:
      return dequantise_blocks<SourceQ6_K>(bytes, columns, out);
    case WeightFormat::kInt8:
      return dequantise_blocks<SourceInt8>(bytes, columns, out);
    case WeightFormat::kInt4:
      return dequantise_blocks<SourceInt4>(bytes, columns, out);
  }
}

void unpack_row(WeightFormat format, const void* panel, int row, int64_t columns, float* out) {
  const uint8_t* from = static_cast<const uint8_t*>(panel);
  const uint8_t* first = from + 4 * row;
  switch (format) {
    case WeightFormat::kF32:
      for (int64_t k = 0; k < columns; ++k) out[k] = load_as<float>(first + k * kStepBytes);
      return;
    case WeightFormat::kF16:
      for (int64_t k = 0; k < columns; ++k) out[k] = f16_at(first + k / 2 * kStepBytes + k % 2 * 2);
      return;
    case WeightFormat::kBF16:
      for (int64_t k = 0; k < columns; ++k) {
        out[k] = float_of_bf16(load_as<uint16_t>(first + k / 2 * kStepBytes + k % 2 * 2));
      }
      return;
    case WeightFormat::kFP8:
      for (int64_t k = 0; k < columns; ++k) {
        const uint8_t* block = first + k / 128 * 4224;
        out[k] = float_of_e4m3(block[kStepBytes + k % 128 / 4 * kStepBytes + k % 4]) * load_as<float>(block);
      }
      return;
    case WeightFormat::kQ8_0:
      return unpack_scaled<PanelQ8_0>(from, row, columns, out);
    case WeightFormat::kQ4_0:
      return unpack_scaled<PanelQ4_0>(from, row, columns, out);
    case WeightFormat::kQ4_K:
      return unpack_k<PanelQ4_K>(from, row, columns, out);
    case WeightFormat::kQ5_K:
      return unpack_k<PanelQ5_K>(from, row, columns, out);
    case WeightFormat::kQ6_K:
      return unpack_blocks<PanelQ6_K>(
          from, row, columns, out, [row](const uint8_t* block, int run, float u, int i) {
            return PanelQ6_K::d(block, row) * PanelQ6_K::scale(block, row, 2 * run + i / 16) * (u - 32.0f);
          });
    case WeightFormat::kInt8:
      return unpack_scaled<PanelInt8>(from, row, columns, out);
    case WeightFormat::kInt4:
      return unpack_blocks<PanelInt4>(from, row, columns, out,
                                      [row](const uint8_t* block, int, float u, int) {
                                        return PanelInt4::scale(block, row) * u + PanelInt4::min(block, row);
                                      });
  }
}

}  // namespace twofold::kernels
