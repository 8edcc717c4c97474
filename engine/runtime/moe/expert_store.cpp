#include "moe/expert_store.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {
namespace {

// Panels that one chunk packs: a chunk should read some hundred kilobytes of the file in one go.
constexpr int64_t kPackPanels = 16;

}  // namespace

ExpertLayout::ExpertLayout(const ExpertShape& shape, const FfnFormats& f) : formats(f) {
  up_offset = size_t(kernels::packed_bytes(f.gate, shape.intermediate, shape.hidden));
  down_offset = up_offset + size_t(kernels::packed_bytes(f.up, shape.intermediate, shape.hidden));
  bytes = down_offset + size_t(kernels::packed_bytes(f.down, shape.hidden, shape.intermediate));
  if (!shape.biases) return;
  bias_offset = bytes;
  up_bias = kernels::up_bias_at(shape.intermediate);
  down_bias = kernels::down_bias_at(shape.intermediate);
  bytes += size_t(kernels::expert_bias_bytes(shape.hidden, shape.intermediate));
}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const FfnFormats> formats,
                         bool huge_pages)
    : num_experts_(num_experts), shape_(shape) {
  lay_out(formats);
  memory_ = PageMemory(allocated_bytes_, huge_pages);
  base_ = memory_.data();
}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const FfnFormats> formats,
                         std::shared_ptr<const FileMapping> file, size_t offset)
    : num_experts_(num_experts), shape_(shape) {
  lay_out(formats);
  base_ = file->range(offset, allocated_bytes_);
  file_ = std::move(file);
}

ExpertStore::ExpertStore(const ExpertStore& other, ThreadPool& pool)
    : num_experts_(other.num_experts_),
      shape_(other.shape_),
      layouts_(other.layouts_),
      kernels_(other.kernels_),
      layer_offsets_(other.layer_offsets_),
      expert_bytes_(other.expert_bytes_),
      allocated_bytes_(other.allocated_bytes_),
      memory_(allocated_bytes_, pool.num_nodes() == 1) {
  base_ = memory_.data();
  for (int layer = 0; layer < num_layers(); ++layer) {
    fill(pool, layer, 0, num_experts_, [&](size_t, int, int64_t, int64_t bytes, std::byte* to) {
      std::memcpy(to, other.base_ + (to - base_), size_t(bytes));
    });
  }
}

void ExpertStore::lay_out(std::span<const FfnFormats> formats) {
  if (num_experts_ < 1 || shape_.hidden < 1 || shape_.intermediate < 1) {
    throw std::invalid_argument(
        "an expert store needs at least one expert, hidden and intermediate unit; given " +
        std::to_string(num_experts_) + ", " + std::to_string(shape_.hidden) + ", " +
        std::to_string(shape_.intermediate));
  }
  for (const FfnFormats& of_layer : formats) {
    layouts_.emplace_back(shape_, of_layer);
    kernels_.push_back(nullptr);
    layer_offsets_.push_back(allocated_bytes_);
    allocated_bytes_ += size_t(num_experts_) * stride(num_layers() - 1);
    expert_bytes_ = std::max(expert_bytes_, layouts_.back().bytes);
  }
}

template <class Make>
void ExpertStore::fill(ThreadPool& pool, int layer, int first, int count, const Make& make) {
  const ExpertLayout& of_layer = layout(layer);
  const FfnFormats& formats = of_layer.formats;
  const struct {
    size_t offset;
    int64_t num_panels, panel_bytes;
  } matrices[] = {
      {0, kernels::num_panels(shape_.intermediate), kernels::panel_bytes(formats.gate, shape_.hidden)},
      {of_layer.up_offset, kernels::num_panels(shape_.intermediate),
       kernels::panel_bytes(formats.up, shape_.hidden)},
      {of_layer.down_offset, kernels::num_panels(shape_.hidden),
       kernels::panel_bytes(formats.down, shape_.intermediate)},
  };
  PanelPieces pieces;  // of three items for each expert
  for (int item = 0; item < 3 * count; ++item) {
    pieces.add(item, matrices[item % 3].num_panels, kPackPanels, pool.num_nodes());
  }
  pieces.finish(pool.num_nodes());
  const LoopPhase phase = pieces.phase();
  pool.parallel_phases(
      {&phase, 1},
      [&](int, int64_t chunk, int) {
        const PanelRange& piece = pieces[chunk];
        const size_t e = size_t(piece.item / 3);
        const auto& matrix = matrices[piece.item % 3];
        std::byte* const to = memory_.data() + layer_offsets_[size_t(layer)] +
                              (size_t(first) + e) * stride(layer) + matrix.offset +
                              size_t(piece.first * matrix.panel_bytes);
        make(e, piece.item % 3, piece.first, piece.count * matrix.panel_bytes, to);
      },
      Stealing::kWithinNode);
}

void ExpertStore::put(ThreadPool& pool, int layer, int first, std::span<const ExpertSource> experts) {
  if (mapped()) throw std::logic_error("the experts of this store lie in a file; nothing can be put into it");
  fill(pool, layer, first, int(experts.size()),
       [&](size_t e, int m, int64_t first_panel, int64_t bytes, std::byte* to) {
         const ExpertSource& source = experts[e];
         const SourceMatrix& matrix = m == 0 ? source.gate : m == 1 ? source.up : source.down;
         pack_panels(matrix, first_panel, bytes / kernels::panel_bytes(matrix.format, matrix.columns), to);
       });
}

void ExpertStore::put_biases(int layer, int first, int count, const float* biases) {
  if (mapped() || !shape_.biases) {
    throw std::logic_error(mapped() ? "the experts of this store lie in a file; nothing can be put into it"
                                    : "the experts of this store have no biases");
  }
  const size_t inner = size_t(shape_.intermediate), hidden = size_t(shape_.hidden);
  const ExpertLayout& of_layer = layout(layer);
  for (int e = first; e < first + count; ++e, biases += 2 * inner + hidden) {
    std::byte* const expert = memory_.data() + (this->expert(layer, e) - base_);
    float* const gate = reinterpret_cast<float*>(expert + of_layer.bias_offset);
    std::memcpy(gate, biases, 4 * inner);
    std::memcpy(gate + kernels::up_bias_at(shape_.intermediate), biases + inner, 4 * inner);
    std::memcpy(gate + kernels::down_bias_at(shape_.intermediate), biases + 2 * inner, 4 * hidden);
  }
}

size_t ExpertStore::bytes() const {
  size_t total = 0;
  for (const ExpertLayout& of_layer : layouts_) total += size_t(num_experts_) * of_layer.bytes;
  return total;
}

}  // namespace twofold
