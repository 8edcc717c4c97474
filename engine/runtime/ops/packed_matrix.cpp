#include "ops/packed_matrix.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {
namespace {

// Source bytes that one chunk packs: large enough to read a file in stretches, small enough to share out.
constexpr int64_t kPackBytes = 256 * 1024;

[[noreturn]] void refuse(const SourceMatrix& matrix, int64_t begin, int num_rows) {
  std::vector<std::byte> panel(static_cast<size_t>(kernels::panel_bytes(matrix.format, matrix.columns)));
  int64_t row = begin;
  for (; row < begin + num_rows - 1; ++row) {
    const void* const data = matrix.row(row);
    const void* const scales = matrix.row_scales(row);
    if (!kernels::pack_panel(matrix.format, &data, scales == nullptr ? nullptr : &scales, 1, matrix.columns,
                             panel.data()))
      break;
  }
  throw std::invalid_argument("row " + std::to_string(row) + " of its " +
                              kernels::layout_of(matrix.format).name +
                              " matrix holds a NaN or an infinity; expected finite weights");
}

}  // namespace

void pack_panels(const SourceMatrix& matrix, int64_t first, int64_t count, std::byte* panels) {
  const int64_t panel_bytes = kernels::panel_bytes(matrix.format, matrix.columns);
  for (int64_t p = first; p < first + count; ++p) {
    const int64_t begin = p * kernels::kPanelRows;
    const int num_rows = static_cast<int>(std::min<int64_t>(kernels::kPanelRows, matrix.rows - begin));
    const void* rows[kernels::kPanelRows] = {};
    const void* scales[kernels::kPanelRows] = {};
    for (int r = 0; r < num_rows; ++r) {
      rows[r] = matrix.row(begin + r);
      scales[r] = matrix.row_scales(begin + r);
    }
    if (!kernels::pack_panel(matrix.format, rows, matrix.scales == nullptr ? nullptr : scales, num_rows,
                             matrix.columns, panels + (p - first) * panel_bytes))
      refuse(matrix, begin, num_rows);
  }
}

void expect_finite(ThreadPool& pool, const SourceMatrix& matrix) {
  const size_t panel_bytes = static_cast<size_t>(kernels::panel_bytes(matrix.format, matrix.columns));
  const int64_t num_panels = kernels::num_panels(matrix.rows);
  const int64_t each = std::max<int64_t>(1, kPackBytes / static_cast<int64_t>(panel_bytes));
  pool.parallel_for((num_panels + each - 1) / each, [&](int64_t chunk, int) {
    const PageMemory panel(panel_bytes, false);
    for (int64_t p = chunk * each; p < std::min(num_panels, (chunk + 1) * each); ++p) {
      pack_panels(matrix, p, 1, panel.data());
    }
  });
}

namespace {

// Panels [first, first + count) of a matrix belong to a rank.
PackedMatrix::RowRange panels_of_rank(int64_t rows, int rank, int num_ranks) {
  const int64_t num_panels = kernels::num_panels(rows);
  const int64_t first = num_panels * rank / num_ranks;
  return {first, num_panels * (rank + 1) / num_ranks - first};
}

}  // namespace

void PackedMatrix::add_segment(int part, kernels::WeightFormat format, int64_t rows, int64_t columns) {
  if (rows < 1 || columns < 1 || columns != columns_) {
    throw std::invalid_argument("PackedMatrix: a part is " + std::to_string(rows) + " x " +
                                std::to_string(columns) + "; expected at least one row of " +
                                std::to_string(columns_) + " columns as the first part has");
  }
  const int64_t panel = kernels::panel_bytes(format, columns_);
  const int64_t begin = rows_;
  rows_ += rows;
  int64_t first_panel = 0, num_panels = kernels::num_panels(rows), own_rows = rows;
  if (Ranks* const ranks = this->ranks()) {
    part_rows_.push_back(rows);
    const RowRange own = panels_of_rank(rows, ranks->rank(), ranks->size());
    first_panel = own.first, num_panels = own.count;
    own_rows =
        std::min(rows, (own.first + own.count) * kernels::kPanelRows) - own.first * kernels::kPanelRows;
  }
  const bool is_compact = ranks() != nullptr && ranks()->rank() > 0;
  if (num_panels > 0) {
    const int64_t at = is_compact ? width_ : begin + first_panel * kernels::kPanelRows;
    segments_.push_back({format, at, own_rows, num_panels, panel, nullptr, part, first_panel});
    bytes_ += static_cast<size_t>(num_panels * panel);
    width_ += is_compact ? own_rows : 0;
  }
  if (!is_compact) width_ = rows_;
}

std::vector<PackedMatrix::RowRange> PackedMatrix::rows_of(int rank) const {
  std::vector<RowRange> ranges;
  int64_t begin = 0;
  for (const int64_t rows : part_rows_) {
    const RowRange panels = panels_of_rank(rows, rank, ranks()->size());
    const int64_t first = panels.first * kernels::kPanelRows;
    const int64_t end = std::min(rows, first + panels.count * kernels::kPanelRows);
    if (panels.count > 0) ranges.push_back({begin + first, end - first});
    begin += rows;
  }
  return ranges;
}

int64_t PackedMatrix::width_of(int rank) const {
  int64_t width = 0;
  for (const RowRange& range : rows_of(rank)) width += range.count;
  return width;
}

void PackedMatrix::put_adapter(const std::shared_ptr<const AdapterRows>& rows, int adapter,
                               std::shared_ptr<const LowRank> part) {
  const LowRank::Shape& shape = part->shape();
  if (adapter < 0 || shape.columns != columns_ || shape.first_row + shape.rows > rows_) {
    throw std::invalid_argument(
        "adapter " + std::to_string(adapter) + " is for rows " + std::to_string(shape.first_row) + " to " +
        std::to_string(shape.first_row + shape.rows) + " of " + std::to_string(shape.columns) +
        " columns; the matrix is " + std::to_string(rows_) + " x " + std::to_string(columns_));
  }
  if (adapters_ == nullptr) adapters_ = std::make_unique<MatrixAdapters>(rows);
  adapters_->put(adapter, std::move(part));
}

void PackedMatrix::drop_adapter(int adapter) {
  if (adapters_ != nullptr) adapters_->drop(adapter);
}

void PackedMatrix::place(const std::byte* panels) {
  for (Segment& segment : segments_) {
    segment.panels = panels;
    panels += segment.num_panels * segment.panel_bytes;
  }
}

template <class Make>
void PackedMatrix::fill(ThreadPool& pool, const Make& make) {
  memory_ = PageMemory(bytes_, pool.num_nodes() == 1);
  place(memory_.data());
  PanelPieces pieces;
  for (size_t s = 0; s < segments_.size(); ++s) {
    pieces.add(static_cast<int>(s), segments_[s].num_panels,
               std::max<int64_t>(1, kPackBytes / segments_[s].panel_bytes), pool.num_nodes());
  }
  pieces.finish(pool.num_nodes());
  const LoopPhase phase = pieces.phase();
  pool.parallel_phases(
      {&phase, 1},
      [&](int, int64_t chunk, int) {
        const PanelRange& piece = pieces[chunk];
        const Segment& segment = segments_[static_cast<size_t>(piece.item)];
        make(segment, piece.first, piece.count,
             memory_.data() + (segment.panel(piece.first) - memory_.data()));
      },
      Stealing::kWithinNode);
}

PackedMatrix::PackedMatrix(ThreadPool& pool, std::span<const SourceMatrix> parts, RankCut cut)
    : cut_(std::move(cut)) {
  if (parts.empty())
    throw std::invalid_argument("PackedMatrix: no parts were given; expected at least one matrix");
  columns_ = parts.front().columns;
  const bool is_absent = ranks() != nullptr && cut_.number == RankCut::kNotCut && ranks()->rank() > 0;
  if (cut_.number == RankCut::kNotCut) cut_.ranks = nullptr;
  for (size_t p = 0; p < parts.size(); ++p)
    add_segment(static_cast<int>(p), parts[p].format, parts[p].rows, parts[p].columns);
  if (is_absent) {
    bytes_ = 0;
    return;
  }
  if (segments_.empty())
    throw std::invalid_argument("PackedMatrix: the parts have fewer panels than there are ranks");
  fill(pool, [&](const Segment& segment, int64_t first, int64_t count, std::byte* to) {
    pack_panels(parts[static_cast<size_t>(segment.part)], segment.first_panel + first, count, to);
  });
}

PackedMatrix::PackedMatrix(ThreadPool& pool, std::span<const Part> parts, int64_t columns,
                           std::shared_ptr<const FileMapping> file, size_t offset)
    : columns_(columns) {
  if (parts.empty())
    throw std::invalid_argument("PackedMatrix: no parts were given; expected at least one matrix");
  for (size_t p = 0; p < parts.size(); ++p)
    add_segment(static_cast<int>(p), parts[p].format, parts[p].rows, columns);
  const std::byte* const panels = file->range(offset, bytes_);
  if (pool.num_nodes() == 1) {
    place(panels);
    file_ = std::move(file);
    return;
  }
  fill(pool, [&](const Segment& segment, int64_t first, int64_t count, std::byte* to) {
    const std::byte* const from = panels + (segment.panel(first) - memory_.data());
    std::memcpy(to, from, static_cast<size_t>(count * segment.panel_bytes));
  });
}

void PanelPieces::add(int item, int64_t num_panels, int64_t most, int num_nodes) {
  for (int node = 0; node < num_nodes; ++node) {
    const int64_t first = first_panel_of_node(num_panels, node, num_nodes);
    const int64_t count = first_panel_of_node(num_panels, node + 1, num_nodes) - first;
    const int64_t num_pieces = (count + most - 1) / most;
    for (int64_t i = 0; i < num_pieces; ++i) {  // of about equal size
      const int64_t from = first + count * i / num_pieces;
      const int64_t to = first + count * (i + 1) / num_pieces;
      pieces_.push_back({item, from, to - from});
      nodes_.push_back(node);
    }
  }
}

void PanelPieces::finish(int num_nodes) {
  per_node_.assign(static_cast<size_t>(num_nodes), 0);
  for (const int node : nodes_) ++per_node_[static_cast<size_t>(node)];
  if (num_nodes == 1) return;
  sorted_.clear();
  for (int node = 0; node < num_nodes; ++node) {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (nodes_[i] == node) sorted_.push_back(pieces_[i]);
    }
  }
  pieces_.swap(sorted_);
}

void PanelPieces::clear() {
  pieces_.clear();
  nodes_.clear();
}

}  // namespace twofold
