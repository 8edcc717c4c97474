#include "moe/expert_store.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace twofold {
namespace {

// Panels that one chunk packs: a chunk should read some hundred kilobytes of the file in one go.
constexpr int64_t kPackPanels = 16;

}  // namespace

ExpertLayout::ExpertLayout(const ExpertShape& shape, const FfnFormats& f) : formats(f) {
  up_offset = size_t(kernels::packed_bytes(f.gate, shape.intermediate, shape.hidden));
  down_offset = up_offset + size_t(kernels::packed_bytes(f.up, shape.intermediate, shape.hidden));
  bytes = down_offset + size_t(kernels::packed_bytes(f.down, shape.hidden, shape.intermediate));
}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const FfnFormats> formats,
                         bool huge_pages)
    : num_experts_(num_experts), shape_(shape) {
  if (formats.empty() || num_experts < 1 || shape.hidden < 1 || shape.intermediate < 1) {
    throw std::invalid_argument(
        "an expert store needs at least one layer, expert, hidden and intermediate unit; given " +
        std::to_string(formats.size()) + ", " + std::to_string(num_experts) + ", " +
        std::to_string(shape.hidden) + ", " + std::to_string(shape.intermediate));
  }
  size_t total = 0;
  for (const FfnFormats& of_layer : formats) {
    layouts_.emplace_back(shape, of_layer);
    layer_offsets_.push_back(total);
    total += size_t(num_experts) * stride(num_layers() - 1);
    expert_bytes_ = std::max(expert_bytes_, layouts_.back().bytes);
  }
  memory_ = PageMemory(total, huge_pages);
}

void ExpertStore::put(ThreadPool& pool, int layer, int first, std::span<const ExpertSource> experts) {
  PanelPieces pieces;  // of three items for each expert
  for (size_t e = 0; e < experts.size(); ++e) {
    const SourceMatrix* matrices[] = {&experts[e].gate, &experts[e].up, &experts[e].down};
    for (int m = 0; m < 3; ++m) {
      pieces.add(int(3 * e) + m, kernels::num_panels(matrices[m]->rows), kPackPanels, pool.num_nodes());
    }
  }
  pieces.finish(pool.num_nodes());
  const LoopPhase phase = pieces.phase();
  const ExpertLayout& of_layer = layout(layer);
  const size_t offsets[] = {0, of_layer.up_offset, of_layer.down_offset};
  pool.parallel_phases(
      {&phase, 1},
      [&](int, int64_t chunk, int) {
        const PanelRange& piece = pieces[chunk];
        const size_t e = size_t(piece.item / 3), m = size_t(piece.item % 3);
        const ExpertSource& source = experts[e];
        const SourceMatrix& matrix = m == 0 ? source.gate : m == 1 ? source.up : source.down;
        std::byte* const base =
            memory_.data() + layer_offsets_[size_t(layer)] + (size_t(first) + e) * stride(layer) + offsets[m];
        pack_panels(matrix, piece.first, piece.count,
                    base + piece.first * kernels::panel_bytes(matrix.format, matrix.columns));
      },
      Stealing::kWithinNode);
}

size_t ExpertStore::bytes() const {
  size_t total = 0;
  for (const ExpertLayout& of_layer : layouts_) total += size_t(num_experts_) * of_layer.bytes;
  return total;
}

}  // namespace twofold
