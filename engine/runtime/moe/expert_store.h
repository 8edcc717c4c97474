// All experts of a model in host memory, each packed once as [gate panels | up panels | down panels] so that
// one copy moves it. Owns the memory; knows nothing of who computes with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/packed_ffn.h"
#include "ops/packed_matrix.h"

namespace twofold {

struct ExpertShape {
  int hidden;        // width of the residual stream
  int intermediate;  // rows of gate and up

  double flops_per_token() const { return 6.0 * hidden * intermediate; }
};

// Where the matrices of an expert lie in its bytes: gate first. The same for all experts of a layer.
struct ExpertLayout {
  FfnFormats formats;
  size_t up_offset, down_offset;
  size_t bytes;

  ExpertLayout(const ExpertShape& shape, const FfnFormats& formats);
  FfnPanels panels(const std::byte* expert) const {
    return {expert, expert + up_offset, expert + down_offset};
  }
};

// One expert as files hold it: gate and up [intermediate, hidden], down [hidden, intermediate].
struct ExpertSource {
  SourceMatrix gate, up, down;
};

class ExpertStore {
 public:
  // One entry of `formats` for each layer. Throws std::invalid_argument on sizes below one, std::bad_alloc
  // when memory is short. Memory is taken from the system while experts are put in; `huge_pages` as
  // PageMemory.
  ExpertStore(int num_experts, ExpertShape shape, std::span<const FfnFormats> formats,
              bool huge_pages = true);

  // Packs experts [first, first + count) of a layer on the pool. Shapes and formats are the caller's to
  // check.
  void put(ThreadPool& pool, int layer, int first, std::span<const ExpertSource> experts);

  const std::byte* expert(int layer, int expert) const {
    return memory_.data() + layer_offsets_[size_t(layer)] + size_t(expert) * stride(layer);
  }
  const ExpertLayout& layout(int layer) const { return layouts_[size_t(layer)]; }
  // From one expert of the layer to the next: its bytes rounded up to a cache line.
  size_t stride(int layer) const { return round_up(layout(layer).bytes, kCacheLine); }

  int num_layers() const { return int(layouts_.size()); }
  int num_experts() const { return num_experts_; }
  const ExpertShape& shape() const { return shape_; }
  // Of the largest expert: what a slot must hold.
  size_t expert_bytes() const { return expert_bytes_; }
  size_t bytes() const;
  // All experts lie in this one range.
  const std::byte* base() const { return memory_.data(); }
  size_t allocated_bytes() const { return memory_.bytes(); }

 private:
  int num_experts_;
  ExpertShape shape_;
  std::vector<ExpertLayout> layouts_;
  std::vector<size_t> layer_offsets_;
  size_t expert_bytes_ = 0;
  PageMemory memory_;
};

}  // namespace twofold
