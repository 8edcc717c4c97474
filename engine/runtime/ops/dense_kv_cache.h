// Memory of a paged KV cache. It knows pages, not sequences: who owns which page is the scheduler's affair.
//
// Layout: [layer][key, value][kv head][page][position in page][head_dim], so the positions of one head over a
// run of consecutive pages, which is what a sequence usually has, are one weight matrix. Untouched pages cost
// no memory (the system maps them on first write) and read as zero.
#pragma once
#include <cstddef>
#include <cstdint>

#include "twofold/kernels.h"

namespace twofold {

class KvCache {
 public:
  // Throws std::invalid_argument for a size below 1 or beyond what can be addressed, std::bad_alloc without
  // room.
  KvCache(int num_layers, int num_pages, int page_size, int num_kv_heads, int head_dim, kernels::DType dtype);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  int num_layers() const { return num_layers_; }
  int num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int num_kv_heads() const { return num_kv_heads_; }
  int head_dim() const { return head_dim_; }
  kernels::DType dtype() const { return dtype_; }
  int64_t bytes() const { return bytes_; }

  // Keys (values) of one page and head: [page_size, head_dim] elements of dtype().
  char* keys(int layer, int page, int head) const { return base_ + offset(layer, page, head); }
  char* values(int layer, int page, int head) const { return keys(layer, page, head) + values_offset_; }

  int64_t row_bytes() const { return row_bytes_; }

 private:
  int64_t offset(int layer, int page, int head) const {
    return layer * 2 * values_offset_ +
           (static_cast<int64_t>(head) * num_pages_ + page) * page_size_ * row_bytes_;
  }

  int num_layers_, num_pages_, page_size_, num_kv_heads_, head_dim_;
  kernels::DType dtype_;
  int64_t row_bytes_ = 0, values_offset_ = 0, bytes_ = 0;
  char* base_ = nullptr;
};

}  // namespace twofold
