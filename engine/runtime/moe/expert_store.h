// All experts of a model in host memory, each packed once as [gate panels | up panels | down panels | biases]
// so that one copy moves it. Each has its own formats, also within a layer. Owns the memory; independent of the
// expert compute.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "host/file_mapping.h"
#include "host/ranks.h"
#include "moe/adapted_experts.h"
#include "ops/packed_ffn.h"
#include "ops/packed_matrix.h"
#include "twofold/kernels.h"

namespace twofold {

struct ExpertShape {
  int hidden;        // width of the residual stream
  int intermediate;  // rows of gate and up
  kernels::ExpertActivation activation = kernels::ExpertActivation::kSilu;
  bool biases = false;  // of gate, up and down
  int second_half = 0;  // rows of gate and up of the second half of a layer's experts; 0: as the first half's

  // Number of experts of the first size.
  int num_first(int num_experts) const { return second_half == 0 ? num_experts : num_experts / 2; }
  // One of the first half's.
  double flops_per_token() const { return 6.0 * hidden * intermediate; }
};

// Formats of a layer's experts: one entry for all, or one for each.
using LayerFormats = std::vector<FfnFormats>;

// Byte offsets of an expert's matrices: gate first.
struct ExpertLayout {
  FfnFormats formats;
  int intermediate;  // rows of gate and up
  size_t up_offset, down_offset;
  size_t bias_offset = 0;  // of float32 (kernels/include/twofold/expert.h); 0: none
  size_t bytes;

  // Biases need `shape.intermediate`.
  ExpertLayout(const ExpertShape& shape, const FfnFormats& formats, int intermediate);
  FfnPanels panels(const std::byte* expert) const {
    FfnPanels panels{expert, expert + up_offset, expert + down_offset};
    if (bias_offset == 0) return panels;
    panels.gate_bias = reinterpret_cast<const float*>(expert + bias_offset);
    panels.up_bias = panels.gate_bias + up_bias;
    panels.down_bias = panels.gate_bias + down_bias;
    return panels;
  }

 private:
  int64_t up_bias = 0, down_bias = 0;
};

// Experts over ranks: bit r of holders[layer * experts + expert] means that rank r holds it.
struct ExpertSpread {
  std::shared_ptr<Ranks> ranks;
  std::vector<uint64_t> holders;

  static constexpr int kMostRanks = 64;
};

// One expert as files store it: gate and up [intermediate, hidden], down [hidden, intermediate].
struct ExpertSource {
  SourceMatrix gate, up, down;
};

class ExpertStore {
 public:
  // One entry of `formats` for each layer. Throws std::invalid_argument on sizes below one, on another number of
  // formats, and on halves that cannot be; std::bad_alloc when memory is short. Memory is allocated while experts are
  // put in; `huge_pages` as PageMemory.
  ExpertStore(int num_experts, ExpertShape shape, std::span<const LayerFormats> formats,
              bool huge_pages = true);
  // The share of spread.ranks->rank(). Throws as above, also where an expert has no holder.
  ExpertStore(int num_experts, ExpertShape shape, std::span<const LayerFormats> formats, bool huge_pages,
              ExpertSpread spread);
  // Experts written by a store of the same shape, from `offset` of a file. They stay there, read-only. Throws
  // as above, also if the file is too short.
  ExpertStore(int num_experts, ExpertShape shape, std::span<const LayerFormats> formats,
              std::shared_ptr<const FileMapping> file, size_t offset);
  // A copy in memory of its own, each node's share by its own threads. Throws std::bad_alloc.
  ExpertStore(const ExpertStore& other, ThreadPool& pool);

  // Packs experts [first, first + count) of a layer on the pool, those that this rank holds. The caller checks shapes
  // and formats. Throws std::logic_error for a store that lies in a file.
  void put(ThreadPool& pool, int layer, int first, std::span<const ExpertSource> experts);

  // Packs the biases of experts [first, first + count) of a layer, [count, 2 intermediate + hidden]: gate's,
  // up's, down's. Throws std::logic_error for a store without biases or in a file.
  void put_biases(int layer, int first, int count, const float* biases);

  // Null for one that other ranks hold.
  const std::byte* expert(int layer, int expert) const {
    const Cell& at = cell(layer, expert);
    return at.offset == kAbsent ? nullptr : base_ + at.offset;
  }
  // Bytes of a layer's experts that this process holds, which lie one after the other on cache lines.
  std::span<const std::byte> panels(int layer) const {
    const size_t begin = layer_begins_[size_t(layer)];
    return {base_ + begin, layer_begins_[size_t(layer) + 1] - begin};
  }
  // Null where this process holds all experts.
  Ranks* ranks() const { return spread_.ranks.get(); }
  uint64_t holders(int layer, int expert) const {
    return spread_.holders[size_t(layer) * size_t(num_experts_) + size_t(expert)];
  }
  // The same object for experts of the same formats and size.
  const ExpertLayout& layout(int layer, int expert) const { return layouts_[cell(layer, expert).layout]; }

  // The kernels that compute a layer's experts on the CPU; the process's kernels by default. The bytes are the
  // same for every level.
  void set_kernels(int layer, const kernels::KernelTable& table) { kernels_[size_t(layer)] = &table; }
  const kernels::KernelTable& kernels(int layer) const {
    const kernels::KernelTable* own = kernels_[size_t(layer)];
    return own != nullptr ? *own : kernels::kernel_table();
  }

  int num_layers() const { return int(layer_begins_.size()) - 1; }
  int num_experts() const { return num_experts_; }
  const ExpertShape& shape() const { return shape_; }
  // Bytes of the largest expert: the minimum size of a slot.
  size_t expert_bytes() const;
  // Mean bytes of the experts of the layer where that is largest, of its first half where sizes differ: what a cost
  // model counts for one.
  size_t mean_expert_bytes() const;
  size_t bytes() const;
  // All experts lie in this one range.
  const std::byte* base() const { return base_; }
  size_t allocated_bytes() const { return allocated_bytes_; }
  // Whether the experts lie in a file's read-only pages.
  bool mapped() const { return file_ != nullptr; }

  // What adapters add to the experts, wherever their weights lie.
  AdaptedExperts adapted;

 private:
  static constexpr size_t kAbsent = ~size_t{0};
  struct Cell {
    size_t layout;  // its index in layouts_
    size_t offset;  // from base_; kAbsent: another rank holds it
  };
  void lay_out(std::span<const LayerFormats> formats);
  size_t layout_of(const FfnFormats& formats, int intermediate);
  const Cell& cell(int layer, int expert) const {
    return cells_[size_t(layer) * size_t(num_experts_) + size_t(expert)];
  }
  // make(e, matrix 0 to 2, its first panel, bytes, where to): for each of a layer's `experts`, the e-th, on the pool.
  template <class Make>
  void fill(ThreadPool& pool, int layer, std::span<const int> experts, const Make& make);

  int num_experts_;
  ExpertShape shape_;
  std::vector<ExpertLayout> layouts_;                 // distinct
  std::vector<Cell> cells_;                           // [layers, experts]
  std::vector<const kernels::KernelTable*> kernels_;  // null: the process's
  std::vector<size_t> layer_begins_;                  // [layers + 1] from base_
  size_t allocated_bytes_ = 0;
  const std::byte* base_ = nullptr;
  PageMemory memory_;
  std::shared_ptr<const FileMapping> file_;
  ExpertSpread spread_{};
};

}  // namespace twofold
