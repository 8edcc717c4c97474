#include "moe/expert_store.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {
namespace {

// Panels that one chunk packs: a chunk should read some hundred kilobytes of the file in one go.
constexpr int64_t kPackPanels = 16;

}  // namespace

ExpertLayout::ExpertLayout(const ExpertShape& shape, const FfnFormats& f, int inner)
    : formats(f), intermediate(inner) {
  up_offset = size_t(kernels::packed_bytes(f.gate, inner, shape.hidden));
  down_offset = up_offset + size_t(kernels::packed_bytes(f.up, inner, shape.hidden));
  bytes = down_offset + size_t(kernels::packed_bytes(f.down, shape.hidden, inner));
  if (!shape.biases) return;
  bias_offset = bytes;
  up_bias = kernels::up_bias_at(inner);
  down_bias = kernels::down_bias_at(inner);
  bytes += size_t(kernels::expert_bias_bytes(shape.hidden, inner));
}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const LayerFormats> formats,
                         bool huge_pages)
    : ExpertStore(num_experts, shape, formats, huge_pages, {}) {}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const LayerFormats> formats,
                         bool huge_pages, ExpertSpread spread)
    : num_experts_(num_experts), shape_(shape), spread_(std::move(spread)) {
  if (ranks() != nullptr) {
    if (ranks()->size() > ExpertSpread::kMostRanks ||
        spread_.holders.size() != formats.size() * size_t(num_experts)) {
      throw std::invalid_argument("holders of " + std::to_string(spread_.holders.size()) + " experts over " +
                                  std::to_string(ranks()->size()) + " ranks were given; expected those of " +
                                  std::to_string(formats.size() * size_t(num_experts)) + ", and at most " +
                                  std::to_string(ExpertSpread::kMostRanks) + " ranks");
    }
    const uint64_t known = ~uint64_t{0} >> (ExpertSpread::kMostRanks - ranks()->size());
    for (size_t e = 0; e < spread_.holders.size(); ++e) {
      if ((spread_.holders[e] & known) == 0 || (spread_.holders[e] & ~known) != 0)
        throw std::invalid_argument("expert " + std::to_string(e) +
                                    " has no rank that holds it, or an unknown one");
    }
  }
  lay_out(formats);
  memory_ = PageMemory(allocated_bytes_, huge_pages);
  base_ = memory_.data();
}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const LayerFormats> formats,
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
      cells_(other.cells_),
      kernels_(other.kernels_),
      layer_begins_(other.layer_begins_),
      allocated_bytes_(other.allocated_bytes_),
      memory_(allocated_bytes_, pool.num_nodes() == 1) {
  base_ = memory_.data();
  std::vector<int> all(static_cast<size_t>(num_experts_));
  std::iota(all.begin(), all.end(), 0);
  for (int layer = 0; layer < num_layers(); ++layer) {
    fill(pool, layer, all, [&](size_t, int, int64_t, int64_t bytes, std::byte* to) {
      std::memcpy(to, other.base_ + (to - base_), size_t(bytes));
    });
  }
}

void ExpertStore::lay_out(std::span<const LayerFormats> formats) {
  if (num_experts_ < 1 || shape_.hidden < 1 || shape_.intermediate < 1) {
    throw std::invalid_argument(
        "an expert store needs at least one expert, hidden and intermediate unit; given " +
        std::to_string(num_experts_) + ", " + std::to_string(shape_.hidden) + ", " +
        std::to_string(shape_.intermediate));
  }
  if (shape_.second_half < 0 || (shape_.second_half > 0 && (num_experts_ % 2 != 0 || shape_.biases))) {
    throw std::invalid_argument("a second half of " + std::to_string(num_experts_) + " experts with " +
                                std::to_string(shape_.second_half) +
                                " intermediate units; an even number of experts without biases was expected");
  }
  for (size_t layer = 0; layer < formats.size(); ++layer) {
    const LayerFormats& of_layer = formats[layer];
    if (of_layer.size() != 1 && of_layer.size() != size_t(num_experts_)) {
      throw std::invalid_argument("formats of " + std::to_string(of_layer.size()) + " experts of layer " +
                                  std::to_string(layer) + " were given; expected those of " +
                                  std::to_string(num_experts_) + ", or one for all");
    }
    kernels_.push_back(nullptr);
    layer_begins_.push_back(allocated_bytes_);
    for (int expert = 0; expert < num_experts_; ++expert) {
      const int inner = expert < shape_.num_first(num_experts_) ? shape_.intermediate : shape_.second_half;
      Cell at{layout_of(of_layer[of_layer.size() == 1 ? 0 : size_t(expert)], inner), kAbsent};
      if (ranks() == nullptr || (holders(int(layer), expert) >> ranks()->rank() & 1) != 0) {
        at.offset = allocated_bytes_;
        allocated_bytes_ += round_up(layouts_[at.layout].bytes, kCacheLine);
      }
      cells_.push_back(at);
    }
  }
  layer_begins_.push_back(allocated_bytes_);
}

size_t ExpertStore::layout_of(const FfnFormats& formats, int intermediate) {
  size_t at = 0;
  while (at < layouts_.size() &&
         (layouts_[at].formats != formats || layouts_[at].intermediate != intermediate))
    ++at;
  if (at == layouts_.size()) layouts_.emplace_back(shape_, formats, intermediate);
  return at;
}

template <class Make>
void ExpertStore::fill(ThreadPool& pool, int layer, std::span<const int> experts, const Make& make) {
  struct Matrix {
    size_t offset;  // from base_
    int64_t num_panels, panel_bytes;
  };
  std::vector<Matrix> matrices;  // three for each expert
  for (const int expert : experts) {
    const ExpertLayout& its = layout(layer, expert);
    const size_t begin = cell(layer, expert).offset;
    const int64_t inner = kernels::num_panels(its.intermediate), outer = kernels::num_panels(shape_.hidden);
    matrices.push_back({begin, inner, kernels::panel_bytes(its.formats.gate, shape_.hidden)});
    matrices.push_back({begin + its.up_offset, inner, kernels::panel_bytes(its.formats.up, shape_.hidden)});
    matrices.push_back(
        {begin + its.down_offset, outer, kernels::panel_bytes(its.formats.down, its.intermediate)});
  }
  PanelPieces pieces;
  for (int item = 0; item < int(matrices.size()); ++item) {
    pieces.add(item, matrices[size_t(item)].num_panels, kPackPanels, pool.num_nodes());
  }
  pieces.finish(pool.num_nodes());
  const LoopPhase phase = pieces.phase();
  pool.parallel_phases(
      {&phase, 1},
      [&](int, int64_t chunk, int) {
        const PanelRange& piece = pieces[chunk];
        const Matrix& matrix = matrices[size_t(piece.item)];
        std::byte* const to = memory_.data() + matrix.offset + size_t(piece.first * matrix.panel_bytes);
        make(size_t(piece.item / 3), piece.item % 3, piece.first, piece.count * matrix.panel_bytes, to);
      },
      Stealing::kWithinNode);
}

void ExpertStore::put(ThreadPool& pool, int layer, int first, std::span<const ExpertSource> experts) {
  if (mapped()) throw std::logic_error("the experts of this store lie in a file; nothing can be put into it");
  std::vector<int> held;
  for (int e = first; e < first + int(experts.size()); ++e) {
    if (expert(layer, e) != nullptr) held.push_back(e);
  }
  fill(pool, layer, held, [&](size_t e, int m, int64_t first_panel, int64_t bytes, std::byte* to) {
    const ExpertSource& source = experts[size_t(held[e] - first)];
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
  for (int e = first; e < first + count; ++e, biases += 2 * inner + hidden) {
    if (expert(layer, e) == nullptr) continue;
    std::byte* const to = memory_.data() + cell(layer, e).offset;
    float* const gate = reinterpret_cast<float*>(to + layout(layer, e).bias_offset);
    std::memcpy(gate, biases, 4 * inner);
    std::memcpy(gate + kernels::up_bias_at(shape_.intermediate), biases + inner, 4 * inner);
    std::memcpy(gate + kernels::down_bias_at(shape_.intermediate), biases + 2 * inner, 4 * hidden);
  }
}

size_t ExpertStore::expert_bytes() const {
  size_t largest = 0;
  for (const ExpertLayout& each : layouts_) largest = std::max(largest, each.bytes);
  return largest;
}

size_t ExpertStore::mean_expert_bytes() const {
  size_t largest = 0;
  for (int layer = 0; layer < num_layers(); ++layer) {
    size_t total = 0;
    const int count = shape_.num_first(num_experts_);
    for (int expert = 0; expert < count; ++expert) total += layout(layer, expert).bytes;
    largest = std::max(largest, total / size_t(count));
  }
  return largest;
}

size_t ExpertStore::bytes() const {
  size_t total = 0;
  for (const Cell& each : cells_) total += each.offset == kAbsent ? 0 : layouts_[each.layout].bytes;
  return total;
}

}  // namespace twofold
