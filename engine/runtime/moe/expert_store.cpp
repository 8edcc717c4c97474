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
    : ExpertStore(num_experts, shape, formats, huge_pages, {}) {}

ExpertStore::ExpertStore(int num_experts, ExpertShape shape, std::span<const FfnFormats> formats,
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
    for (size_t e = 0, next = 0; e < spread_.holders.size(); ++e) {
      if ((spread_.holders[e] & known) == 0 || (spread_.holders[e] & ~known) != 0)
        throw std::invalid_argument("expert " + std::to_string(e) +
                                    " has no rank that holds it, or an unknown one");
      if (e % size_t(num_experts) == 0) next = 0;
      const bool is_held = (spread_.holders[e] >> ranks()->rank() & 1) != 0;
      places_.push_back(is_held ? int(next++) : -1);
    }
  }
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
  std::vector<int> all(static_cast<size_t>(num_experts_));
  std::iota(all.begin(), all.end(), 0);
  for (int layer = 0; layer < num_layers(); ++layer) {
    fill(pool, layer, all, [&](size_t, int, int64_t, int64_t bytes, std::byte* to) {
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
    allocated_bytes_ += size_t(num_held(num_layers() - 1)) * stride(num_layers() - 1);
    expert_bytes_ = std::max(expert_bytes_, layouts_.back().bytes);
  }
}

int ExpertStore::num_held(int layer) const {
  if (places_.empty()) return num_experts_;
  const auto begin = places_.begin() + int64_t{layer} * num_experts_;
  return static_cast<int>(num_experts_ - std::count(begin, begin + num_experts_, -1));
}

template <class Make>
void ExpertStore::fill(ThreadPool& pool, int layer, std::span<const int> experts, const Make& make) {
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
  for (int item = 0; item < 3 * int(experts.size()); ++item) {
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
                              size_t(place(layer, experts[e])) * stride(layer) + matrix.offset +
                              size_t(piece.first * matrix.panel_bytes);
        make(e, piece.item % 3, piece.first, piece.count * matrix.panel_bytes, to);
      },
      Stealing::kWithinNode);
}

void ExpertStore::put(ThreadPool& pool, int layer, int first, std::span<const ExpertSource> experts) {
  if (mapped()) throw std::logic_error("the experts of this store lie in a file; nothing can be put into it");
  std::vector<int> held;
  for (int e = first; e < first + int(experts.size()); ++e) {
    if (place(layer, e) >= 0) held.push_back(e);
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
  const ExpertLayout& of_layer = layout(layer);
  for (int e = first; e < first + count; ++e, biases += 2 * inner + hidden) {
    if (place(layer, e) < 0) continue;
    std::byte* const expert = memory_.data() + (this->expert(layer, e) - base_);
    float* const gate = reinterpret_cast<float*>(expert + of_layer.bias_offset);
    std::memcpy(gate, biases, 4 * inner);
    std::memcpy(gate + kernels::up_bias_at(shape_.intermediate), biases + inner, 4 * inner);
    std::memcpy(gate + kernels::down_bias_at(shape_.intermediate), biases + 2 * inner, 4 * hidden);
  }
}

size_t ExpertStore::bytes() const {
  size_t total = 0;
  for (int layer = 0; layer < num_layers(); ++layer) total += size_t(num_held(layer)) * layout(layer).bytes;
  return total;
}

}  // namespace twofold
