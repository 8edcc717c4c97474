// Source rows into panels.
#include "source_blocks.h"

namespace twofold::kernels {
namespace {

// Formats whose weights are elements: W columns of a row per step.
template <class Element, int W>
void pack_elements(const void* const* rows, int num_rows, int64_t columns, uint8_t* panel) {
  const int64_t steps = (columns + W - 1) / W;
  std::memset(panel, 0, static_cast<size_t>(steps * kStepBytes));
  constexpr int kBytes = static_cast<int>(sizeof(Element));
  for (int r = 0; r < num_rows; ++r) {
    const uint8_t* row = static_cast<const uint8_t*>(rows[r]);
    uint8_t* to = panel + 4 * r;
    int64_t s = 0;
    for (; (s + 1) * W <= columns; ++s) std::memcpy(to + s * kStepBytes, row + 4 * s, 4);
    if (s < steps)
      std::memcpy(to + s * kStepBytes, row + 4 * s, static_cast<size_t>((columns - s * W) * kBytes));
  }
}

void pack_fp8(const void* const* rows, const float* const* scales, int num_rows, int64_t columns,
              uint8_t* panel) {
  constexpr int64_t kColumns = 128, kBytes = 4224;
  std::memset(panel, 0, static_cast<size_t>(panel_bytes(WeightFormat::kFP8, columns)));
  for (int64_t b = 0; b * kColumns < columns; ++b) {
    uint8_t* block = panel + b * kBytes;
    const int64_t rest = columns - b * kColumns < kColumns ? columns - b * kColumns : kColumns;
    for (int r = 0; r < num_rows; ++r) {
      const uint8_t* row = static_cast<const uint8_t*>(rows[r]) + b * kColumns;
      store_as(block + 4 * r, scales[r][b]);
      uint8_t* to = block + kStepBytes + 4 * r;
      for (int64_t k = 0; k < rest; k += 4) {
        std::memcpy(to + k / 4 * kStepBytes, row + k, static_cast<size_t>(rest - k < 4 ? rest - k : 4));
      }
    }
  }
}

template <class Source>
void pack_blocks(const void* const* rows, int num_rows, int64_t columns, uint8_t* panel) {
  using Panel = typename Source::Panel;
  const int64_t blocks = columns / Panel::kColumns;
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* to = panel + b * Panel::kBytes;
    std::memset(to, 0, Panel::kBytes);
    for (int r = 0; r < num_rows; ++r) {
      const uint8_t* from = static_cast<const uint8_t*>(rows[r]) + b * Source::kBytes;
      Source::put_scales(from, to, r);
      for (int run = 0; run < Panel::kColumns / kRunColumns; ++run) {
        uint8_t u[kRunColumns];
        Source::values(from, run, u);
        Panel::put_values(to, r, run, u);
      }
    }
  }
}

}  // namespace

void pack_panel(WeightFormat format, const void* const* rows, const float* const* scales, int num_rows,
                int64_t columns, void* panel) {
  uint8_t* to = static_cast<uint8_t*>(panel);
  switch (format) {
    case WeightFormat::kF32:
      return pack_elements<float, 1>(rows, num_rows, columns, to);
    case WeightFormat::kF16:
    case WeightFormat::kBF16:
      return pack_elements<uint16_t, 2>(rows, num_rows, columns, to);
    case WeightFormat::kFP8:
      return pack_fp8(rows, scales, num_rows, columns, to);
    case WeightFormat::kQ8_0:
      return pack_blocks<SourceQ8_0>(rows, num_rows, columns, to);
    case WeightFormat::kQ4_0:
      return pack_blocks<SourceQ4_0>(rows, num_rows, columns, to);
    case WeightFormat::kQ4_K:
      return pack_blocks<SourceQ4_K>(rows, num_rows, columns, to);
    case WeightFormat::kQ5_K:
      return pack_blocks<SourceQ5_K>(rows, num_rows, columns, to);
    case WeightFormat::kQ6_K:
      return pack_blocks<SourceQ6_K>(rows, num_rows, columns, to);
    case WeightFormat::kInt8:
      return pack_blocks<SourceInt8>(rows, num_rows, columns, to);
    case WeightFormat::kInt4:
      return pack_blocks<SourceInt4>(rows, num_rows, columns, to);
  }
}

}  // namespace twofold::kernels
