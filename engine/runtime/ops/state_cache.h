// The KV cache and recurrent state: pages of tokens, and one record per sequence. It knows pages and records,
// not sequences: the scheduler tracks their owners.
//
// Pages: each layer has planes of a fixed number of elements per token. Layout: [layer][plane][page][position
// in page][element], so one plane's positions over a run of consecutive pages, the usual case of a sequence,
// are one matrix. Grouped-query attention has a plane per key head, then one per value head; latent attention
// has one. Records: [layer][record][byte]. Layers may differ. Untouched memory costs nothing (the system maps
// it on first write) and reads as zero. Rows of integers have a scale each, stored after their plane in the
// same order.
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

// State kept by one layer; it may be empty.
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
  // Changes the number of pages: page kept[i].second holds what page kept[i].first did, the other pages'
  // contents are undefined. Records stay as they are, or, without keep_records, are reallocated as untouched
  // memory. Throws as the constructor, and std::out_of_range for a page that does not exist; then nothing has
  // changed.
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

  // Copies all layers' rows of page `from` (all layers' record `from`) to `to`. Throw std::out_of_range for a
  // page or record that does not exist.
  void fork_page(int from, int to);
  void fork_record(int from, int to);
  // Copies a page of all layers, to be restored later into any page: plane by plane, each followed by its
  // scales.
  std::vector<std::byte> page_snapshot(int page) const;
  void restore_page(int page, std::span<const std::byte> snapshot);
  // Copies a record of all layers, to be restored later into any record.
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
  int64_t page_bytes_ = 0;    // one page, all layers
  int64_t record_bytes_ = 0;  // one record, all layers
  int64_t bytes_ = 0;
  char* base_ = nullptr;
};

}  // namespace twofold
