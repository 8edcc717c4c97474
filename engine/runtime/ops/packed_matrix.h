// Weight matrices in the kernels' panels (weight_format.h), packed once from the rows of a file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "host/file_mapping.h"
#include "host/page_memory.h"
#include "host/ranks.h"
#include "host/thread_pool.h"
#include "ops/low_rank.h"
#include "twofold/weight_format.h"

namespace twofold {

// A matrix as a file stores it. Owns nothing.
struct SourceMatrix {
  kernels::WeightFormat format;
  const std::byte* data;
  int64_t rows, columns;
  int64_t row_stride;  // bytes from a row to the next
  // fp8: f32 [rows / 128, columns / 128], rounded up; of blocks whose scales lie apart: bytes [rows, blocks of a row]
  const std::byte* scales = nullptr;
  int64_t scale_stride = 0;  // bytes from one row of scales to the next
  int64_t scale_rows = 1;    // rows of weights that share one

  const std::byte* row(int64_t r) const { return data + r * row_stride; }
  const std::byte* row_scales(int64_t r) const {
    return scales == nullptr ? nullptr : scales + r / scale_rows * scale_stride;
  }
};

// Packs panels [first, first + count) of a matrix, one after the other, to `panels` (64-byte aligned). Throws
// std::invalid_argument, which names the row, where a weight is a NaN or an infinity.
void pack_panels(const SourceMatrix& matrix, int64_t first, int64_t count, std::byte* panels);

// Throws as pack_panels for a matrix that is read in place and never packed.
void expect_finite(ThreadPool& pool, const SourceMatrix& matrix);

// Distribution of one matrix's panels over memory nodes: node d has [first(d), first(d + 1)).
inline int64_t first_panel_of_node(int64_t num_panels, int node, int num_nodes) {
  return num_panels * node / num_nodes;
}

// How a matrix is cut over ranks: each holds some whole panels of every part. All ranks know it by its number. Without
// one (kNotCut) rank 0 holds the matrix, and the others know its sizes alone.
struct RankCut {
  static constexpr int kNotCut = -1;

  std::shared_ptr<Ranks> ranks;
  int number = kNotCut;
};

// Several matrices of the same number of columns, stacked by rows; each has its own format and its own
// panels. Cut over ranks, the matrix holds this rank's panels alone.
class PackedMatrix {
 public:
  struct Segment {
    kernels::WeightFormat format;
    int64_t first_row, rows;  // in a product's row; see width
    int64_t num_panels, panel_bytes;
    const std::byte* panels;
    int part = 0;             // which of the stack's matrices
    int64_t first_panel = 0;  // the part's first panel that is held

    const std::byte* panel(int64_t p) const { return panels + p * panel_bytes; }
  };

  // Packs on the pool, each node's share by its own threads. Throws std::invalid_argument for no parts, empty
  // ones or different numbers of columns, std::bad_alloc.
  PackedMatrix(ThreadPool& pool, std::span<const SourceMatrix> parts) : PackedMatrix(pool, parts, {}) {}
  // The share of cut.ranks->rank(). Throws as above, also where this rank would get no panel.
  PackedMatrix(ThreadPool& pool, std::span<const SourceMatrix> parts, RankCut cut);

  struct Part {
    kernels::WeightFormat format;
    int64_t rows;
  };
  // Panels as a PackedMatrix had them, from `offset` of a file. They stay there; with several nodes they are
  // copied, each node's share by its own threads. Throws as above, also where the file is too short.
  PackedMatrix(ThreadPool& pool, std::span<const Part> parts, int64_t columns,
               std::shared_ptr<const FileMapping> file, size_t offset);

  // Rows of the stack, whatever this rank holds of them.
  int64_t rows() const { return rows_; }
  // Columns of a product as segments number them: all rows on rank 0, this rank's alone on others.
  int64_t width() const { return width_; }
  // Null where the matrix is not cut.
  Ranks* ranks() const { return cut_.ranks.get(); }
  int number() const { return cut_.number; }
  // Rows of the stack that another rank holds, in the order of its segments.
  struct RowRange {
    int64_t first, count;
  };
  std::vector<RowRange> rows_of(int rank) const;
  // Their number.
  int64_t width_of(int rank) const;
  int64_t columns() const { return columns_; }
  size_t bytes() const { return bytes_; }
  const std::vector<Segment>& segments() const { return segments_; }
  // All segments' panels, one after the other.
  const std::byte* panels() const { return segments_.front().panels; }

  // Null where no adapter was put.
  const MatrixAdapters* adapters() const { return adapters_.get(); }
  // See MatrixAdapters. Between two steps only; throws std::invalid_argument for rows that the matrix does not have.
  void put_adapter(const std::shared_ptr<const AdapterRows>& rows, int adapter,
                   std::shared_ptr<const LowRank> part);
  void drop_adapter(int adapter);

 private:
  void add_segment(int part, kernels::WeightFormat format, int64_t rows, int64_t columns);
  void place(const std::byte* panels);
  // make(segment, its first panel, how many, where to): on the pool, in memory of its own.
  template <class Make>
  void fill(ThreadPool& pool, const Make& make);

  int64_t rows_ = 0, columns_ = 0, width_ = 0;
  size_t bytes_ = 0;
  RankCut cut_{};
  std::vector<int64_t> part_rows_;  // rows of each part, where the matrix is cut
  std::vector<Segment> segments_;
  PageMemory memory_;
  std::shared_ptr<const FileMapping> file_;
  std::unique_ptr<MatrixAdapters> adapters_;
};

// A piece of work: some panels of one matrix.
struct PanelRange {
  int item;  // which matrix, segment or unit
  int64_t first, count;
};

// The panels of several matrices cut into pieces of at most `most` panels, those of node 0 first: a
// loop's chunks, in an order in which a thread's neighbouring chunks are neighbouring memory.
class PanelPieces {
 public:
  // Adds panels of `item`. Pieces end where a node's share ends.
  void add(int item, int64_t num_panels, int64_t most, int num_nodes);
  // Orders them by node. To be called once, after the last add.
  void finish(int num_nodes);
  void clear();

  LoopPhase phase() const { return {static_cast<int64_t>(pieces_.size()), per_node_.data()}; }
  const PanelRange& operator[](int64_t chunk) const { return pieces_[static_cast<size_t>(chunk)]; }
  int64_t size() const { return static_cast<int64_t>(pieces_.size()); }

 private:
  std::vector<PanelRange> pieces_, sorted_;
  std::vector<int> nodes_;
  std::vector<int64_t> per_node_;
};

}  // namespace twofold
