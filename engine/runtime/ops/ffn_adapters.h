// What adapters add to the feed-forwards of one run (packed_ffn.h): the ranks of gate and up from a row's input, those
// of down from what lies between the products.
#pragma once
#include <cstdint>
#include <vector>

#include "host/thread_pool.h"
#include "ops/packed_ffn.h"

namespace twofold {

class FfnAdapters {
 public:
  // Takes scratch slot kLowRankScratch where a row uses an adapter.
  FfnAdapters(ThreadPool& pool, const FfnRows& rows);

  bool empty() const { return rows_.empty(); }
  // Whether a row of the group uses an adapter.
  bool any(int group) const { return !empty() && groups_[size_t(group)] != 0; }
  int num_rows() const { return static_cast<int>(rows_.size()); }
  int token(int row) const { return rows_[size_t(row)].token; }
  bool uses(int row) const { return rows_[size_t(row)].adapter != AdapterRows::kNone; }

  enum Part : uint8_t { kGate, kUp, kDown };
  // A x of gate and up for a row's input, once where both have the same A.
  void read_input(const kernels::KernelTable& table, int row, const float* x) const;
  // A h of down for a row's activation.
  void read_inner(const kernels::KernelTable& table, int row, const float* h) const {
    read(table, kDown, row, h);
  }
  // y += B (A x) in columns [first, first + count) of a row of the part's product.
  void add(const kernels::KernelTable& table, Part part, int row, int first, int count, float* y) const;

 private:
  struct Row {
    const FfnPanels* panels;
    int32_t adapter;
    int token;
  };
  void read(const kernels::KernelTable& table, Part part, int row, const float* x) const;
  const MatrixAdapters* of(Part part, int row) const;
  float* ranks(Part part, int row) const { return t_ + (int64_t{row} * 3 + part) * width_; }

  std::vector<Row> rows_;  // empty: nothing to add
  std::vector<uint8_t> groups_;
  int width_ = 0;  // the largest of all adapters' ranks
  float* t_ = nullptr;
};

}  // namespace twofold
