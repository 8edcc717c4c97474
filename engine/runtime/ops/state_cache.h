// Memory of what sequences keep between steps: pages of tokens, and one record per sequence. It knows pages
// and records, not sequences: who owns which is the scheduler's affair.
//
// Pages: each layer has planes, a plane so many elements per token. Layout: [layer][plane][page][position in
// page][element], so the positions of one plane over a run of consecutive pages, which is what a sequence
// usually has, are one matrix. Grouped-query attention has a plane per key head, then one per value head;
// latent attention has one. Records: [layer][record][byte]. Layers may differ. Untouched memory costs nothing
// (the system maps it on first write) and reads as zero. Rows of whole numbers have a scale each, behind their plane
// and in the same order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "twofold/kernels.h"

namespace twofold {

// `count` planes of `width` elements per token.
struct Planes {
  int count, width;
  kernels::DType dtype;
};

// What one layer keeps; nothing is a layer, too.
struct LayerState {
  std::vector<Planes> planes;  // numbered through from 0
  int64_t record_bytes = 0;    // per sequence
};

struct StatePlane {
  char* base;
  int width;
  kernels::DType dtype;
  int64_t row_bytes, page_bytes;
  float* scales = nullptr;  // [page][position in page]; null: 1 for every row

  char* page(int number) const { return base + number * page_bytes; }  // [page_size, width]
  const float* scales_of(const char* row) const { return scales + (row - base) / row_bytes; }
};

class StateCache {
 public:
  // Throws std::invalid_argument for a size below 1 (num_records: below 0) or beyond what can be addressed,
  // std::bad_alloc without room.
  StateCache(std::span<const LayerState> layers, int num_pages, int page_size, int num_records = 0);
  ~StateCache();
  StateCache(const StateCache&) = delete;
  // So many pages from now on: page kept[i].second holds what page kept[i].first did, what the others hold is anybody's
  // guess. Records stay as they are, or, without keep_records, begin anew with memory that costs nothing yet. Throws as
  // the constructor, and std::out_of_range for a page that is not there; then nothing has changed.
  void resize(int num_pages, std::span<const std::pair<int, int>> kept, bool keep_records = true);
  StateCache& operator=(const StateCache&) = delete;

  int num_layers() const { return static_cast<int>(layers_.size()); }
  int num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int num_records() const { return num_records_; }
  int64_t bytes() const { return bytes_; }

  const std::vector<StatePlane>& planes(int layer) const {
    return layers_[static_cast<size_t>(layer)].planes;
  }
  int64_t record_bytes(int layer) const { return layers_[static_cast<size_t>(layer)].record_bytes; }
  std::span<std::byte> record(int layer, int record) const;

  // All layers' rows of page `from` (all layers' record `from`) become those of `to`. Throw std::out_of_range
  // for what is not there.
  void fork_page(int from, int to);
  void fork_record(int from, int to);
  // A page of all layers, to be put back later, into any page: plane by plane, each with its scales behind it.
  std::vector<std::byte> page_snapshot(int page) const;
  void restore_page(int page, std::span<const std::byte> snapshot);
  // A record of all layers, to be put back later, into any record.
  std::vector<std::byte> snapshot(int record) const;
  void restore(int record, std::span<const std::byte> snapshot);

 private:
  struct Layer {
    std::vector<StatePlane> planes;
    std::byte* records;
    int64_t record_bytes;
  };

  void check_page(int page) const;
  void check_record(int record) const;

  int num_pages_, page_size_, num_records_;
  std::vector<Layer> layers_;
  int64_t page_bytes_ = 0;    // of all layers
  int64_t record_bytes_ = 0;  // of all layers
  int64_t bytes_ = 0;
  char* base_ = nullptr;
};

}  // namespace twofold
