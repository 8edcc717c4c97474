// Adapters (LoRA, arXiv 2106.09685): a row that uses one gets W x + B (A x) instead of W x. The adapter's scale is in B.
//
// A step sets which adapter each of its rows uses (AdapterRows); a matrix has the adapters' parts (MatrixAdapters). The
// product with the matrix computes both (LowRankProduct), so that no block knows of adapters. A row's result depends on
// its own adapter alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "twofold/kernels.h"

namespace twofold {

struct InputRows;

// Which adapter each row of the coming products uses. One for all matrices of a model.
class AdapterRows {
 public:
  static constexpr int32_t kNone = -1;

  void set(std::vector<int32_t> adapters);
  // The adapters that rows [first, first + num_rows) of the step use; empty where no row uses one. Throws KernelFailure where the step
  // has fewer rows.
  std::span<const int32_t> of(int64_t first, int64_t num_rows) const;

 private:
  std::vector<int32_t> adapters_;
};

// One adapter's A [rank, columns] and B [rows, rank] for rows [first_row, first_row + rows) of a matrix. Either is kept
// in bf16 where that is exact.
class LowRank {
 public:
  struct Shape {
    int64_t first_row, rows, columns;
    int rank;
  };
  // a and b are row-major and copied; where `like` has the same A, both keep one. Throws std::invalid_argument for a size below 1.
  LowRank(const Shape& shape, const float* a, const float* b, const LowRank* like = nullptr);

  int rank() const { return shape_.rank; }
  const Shape& shape() const { return shape_; }
  // Bytes in memory; an A that another part had before counts there.
  size_t bytes() const { return (is_like_ ? 0 : a_->bytes.size()) + b_.bytes.size(); }
  bool has_same_a(const LowRank& other) const { return a_ == other.a_; }
  // A, then B, as they were given.
  std::vector<float> values() const;
  // t[i] = A_i x for i in [first, first + count).
  void down(const kernels::KernelTable& table, const float* x, int first, int count, float* t) const;
  // y[i] += B_i t for the rows i of the matrix in [first, first + count) that are its own; y begins with row `first`.
  void up(const kernels::KernelTable& table, const float* t, int64_t first, int64_t count, float* y) const;

 private:
  struct Values {
    kernels::DType dtype;
    std::vector<std::byte> bytes;

    float at(int64_t index) const;
  };
  static Values exact(const std::vector<float>& values);
  // Index of an element of B in b_.
  int64_t place_of(int64_t row, int r) const {
    return (row / kernels::kPanelRows * shape_.rank + r) * kernels::kPanelRows + row % kernels::kPanelRows;
  }

  Shape shape_;
  std::shared_ptr<const Values> a_;
  bool is_like_ = false;
  Values b_;  // [panels of rows][rank][kPanelRows], zeros after the last row
};

// The adapters' parts of one matrix.
class MatrixAdapters {
 public:
  explicit MatrixAdapters(std::shared_ptr<const AdapterRows> rows) : rows_(std::move(rows)) {}

  // Adds a part; a stack of several matrices has one for each. Throws std::invalid_argument for another's rows.
  void put(int adapter, std::shared_ptr<const LowRank> part);
  void drop(int adapter);
  const AdapterRows& rows() const { return *rows_; }
  // The largest of all parts put so far.
  int max_rank() const { return max_rank_; }

  // Sum of the ranks of an adapter's parts; 0: it leaves the matrix as it is.
  int width(int adapter) const;
  // The part whose rows begin with first_row; null: none does.
  const LowRank* part(int adapter, int64_t first_row) const;
  // Whether `down` of both gives the same: each has one part, and they share its A.
  bool has_same_down(const MatrixAdapters& other, int adapter) const;
  // As LowRank, over all parts: t is [width].
  void down(const kernels::KernelTable& table, int adapter, const float* x, int first, int count,
            float* t) const;
  void up(const kernels::KernelTable& table, int adapter, const float* t, int64_t first, int64_t count,
          float* y) const;

 private:
  using Parts = std::vector<std::shared_ptr<const LowRank>>;
  std::span<const std::shared_ptr<const LowRank>> parts(int adapter) const;

  std::shared_ptr<const AdapterRows> rows_;
  std::vector<Parts> parts_;  // by adapter; ascending in rows
  int max_rank_ = 0;
};

// What adapters add to the product of M rows, from row `first` of the step on, with one matrix. The caller runs the chunks of `down` in any order and
// threads, and `up` for each piece of the product afterwards.
class LowRankProduct {
 public:
  // adapters may be null. Throws as AdapterRows::of.
  LowRankProduct(const MatrixAdapters* adapters, int64_t first, int M, int64_t columns);

  bool empty() const { return width_ == 0; }
  int64_t num_floats() const { return int64_t{width_} * static_cast<int64_t>(of_row_.size()); }
  // num_floats() floats for the results of `down`.
  void place(float* memory) { t_ = memory; }
  int64_t num_chunks() const { return chunks_of_row_ * static_cast<int64_t>(of_row_.size()); }
  // temporary holds as many floats as the matrix has columns.
  void down(const kernels::KernelTable& table, const InputRows& input, int64_t chunk, float* temporary) const;
  // y[i] += the adapter's part of row m in columns [first, first + count) of the product.
  void up(const kernels::KernelTable& table, int m, int64_t first, int64_t count, float* y) const;

 private:
  const MatrixAdapters* adapters_ = nullptr;
  std::span<const int32_t> of_row_;  // empty: nothing to add
  int width_ = 0;                    // the largest of the rows' adapters
  int64_t chunks_of_row_ = 0;
  int64_t columns_ = 0;
  float* t_ = nullptr;
};

}  // namespace twofold
