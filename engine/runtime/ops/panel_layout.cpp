#include "ops/panel_layout.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "ops/packed_matrix.h"

namespace twofold {
namespace {

// Two panels, the second one incomplete; whole blocks of every format.
constexpr int64_t kRows = 37, kColumns = 512;

class Fnv1a {
 public:
  void add(const void* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      hash_ = (hash_ ^ static_cast<const unsigned char*>(bytes)[i]) * 0x100000001b3u;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

}  // namespace

std::string panel_layout() {
  constexpr size_t kScales = (kRows + 127) / 128 * ((kColumns + 127) / 128);
  std::array<float, kScales> scales;
  for (size_t i = 0; i < kScales; ++i) scales[i] = 1.0f + static_cast<float>(i);
  Fnv1a hash;
  for (int number = 0; number < kernels::kNumWeightFormats; ++number) {
    const auto format = static_cast<kernels::WeightFormat>(number);
    const kernels::FormatLayout& layout = kernels::layout_of(format);
    const int64_t row_bytes = kernels::source_row_bytes(format, kColumns);
    std::vector<std::byte> rows(static_cast<size_t>(kRows * row_bytes));
    uint32_t state = 12345;
    for (std::byte& byte : rows) {
      state = state * 1664525 + 1013904223;
      byte = std::byte(state >> 24 & 0xfb);  // never an infinity or NaN in a float format
    }
    SourceMatrix matrix{format, rows.data(), kRows, kColumns, row_bytes};
    if (layout.scale_grid != 0) {
      matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
      matrix.scale_stride = static_cast<int64_t>(sizeof scales);
      matrix.scale_rows = layout.scale_grid;
    }
    const int64_t num_panels = kernels::num_panels(kRows);
    const PageMemory panels(static_cast<size_t>(num_panels * kernels::panel_bytes(format, kColumns)), false);
    pack_panels(matrix, 0, num_panels, panels.data());
    hash.add(layout.name, std::char_traits<char>::length(layout.name));
    hash.add(panels.data(), panels.bytes());
  }
  char text[40];
  (void)std::snprintf(text, sizeof text, "panels%d-%016llx", kernels::kPanelRows,
                      static_cast<unsigned long long>(hash.value()));
  return text;
}

}  // namespace twofold
