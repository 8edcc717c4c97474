#include "ops/low_rank.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "ops/linear.h"
#include "ops/tensor_view.h"

namespace twofold {
namespace {

constexpr int kPanelRows = kernels::kPanelRows;
constexpr int kChunkRanks = 8;  // rows of A that a chunk multiplies: some microseconds of work

bool is_before(const std::shared_ptr<const LowRank>& a, const std::shared_ptr<const LowRank>& b) {
  return a->shape().first_row < b->shape().first_row;
}

}  // namespace

void AdapterRows::set(std::vector<int32_t> adapters) {
  const bool any = std::any_of(adapters.begin(), adapters.end(), [](int32_t a) { return a != kNone; });
  adapters_ = any ? std::move(adapters) : std::vector<int32_t>{};
}

std::span<const int32_t> AdapterRows::of(int64_t first, int64_t num_rows) const {
  if (adapters_.empty()) return {};
  if (std::ssize(adapters_) < first + num_rows) {
    throw KernelFailure("adapters of " + std::to_string(adapters_.size()) +
                        " rows are set; the product has " + std::to_string(first + num_rows));
  }
  return std::span(adapters_).subspan(static_cast<size_t>(first), static_cast<size_t>(num_rows));
}

LowRank::Values LowRank::exact(const std::vector<float>& values) {
  const auto bits_of = [](float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  };
  const bool fits =
      std::all_of(values.begin(), values.end(), [&](float v) { return (bits_of(v) & 0xffff) == 0; });
  const size_t size = fits ? sizeof(uint16_t) : sizeof(float);
  Values kept{fits ? kernels::DType::kBF16 : kernels::DType::kF32,
              std::vector<std::byte>(values.size() * size)};
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = bits_of(values[i]);
    const auto upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(kept.bytes.data() + i * size, fits ? static_cast<const void*>(&upper) : &bits, size);
  }
  return kept;
}

LowRank::LowRank(const Shape& shape, const float* a, const float* b, const LowRank* like) : shape_(shape) {
  if (shape.first_row < 0 || shape.rows < 1 || shape.columns < 1 || shape.rank < 1) {
    throw std::invalid_argument("an adapter of rank " + std::to_string(shape.rank) + " for " +
                                std::to_string(shape.rows) + " x " + std::to_string(shape.columns) +
                                " weights; expected sizes of 1 or more");
  }
  Values own = exact({a, a + shape.rank * shape.columns});
  is_like_ = like != nullptr && like->shape_.columns == shape.columns && like->a_->dtype == own.dtype &&
             like->a_->bytes == own.bytes;
  a_ = is_like_ ? like->a_ : std::make_shared<const Values>(std::move(own));
  const int64_t num_panels = (shape.rows + kPanelRows - 1) / kPanelRows;
  std::vector<float> panels(static_cast<size_t>(num_panels * shape.rank * kPanelRows), 0.0f);
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int r = 0; r < shape.rank; ++r) {
      panels[static_cast<size_t>(place_of(row, r))] = b[row * shape.rank + r];
    }
  }
  b_ = exact(panels);
}

float LowRank::Values::at(int64_t index) const {
  uint32_t bits = 0;
  const auto size = static_cast<size_t>(kernels::element_bytes(dtype));
  std::memcpy(&bits, bytes.data() + static_cast<size_t>(index) * size, size);
  if (dtype == kernels::DType::kBF16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::vector<float> LowRank::values() const {
  std::vector<float> values;
  for (int64_t i = 0; i < shape_.rank * shape_.columns; ++i) values.push_back(a_->at(i));
  for (int64_t row = 0; row < shape_.rows; ++row) {
    for (int r = 0; r < shape_.rank; ++r) values.push_back(b_.at(place_of(row, r)));
  }
  return values;
}

void LowRank::down(const kernels::KernelTable& table, const float* x, int first, int count, float* t) const {
  const int columns = static_cast<int>(shape_.columns);
  const std::byte* const rows = a_->bytes.data() + first * shape_.columns * kernels::element_bytes(a_->dtype);
  table.rows_of(a_->dtype).matmul(x, columns, rows, t, count, 1, count, columns);
}

void LowRank::up(const kernels::KernelTable& table, const float* t, int64_t first, int64_t count,
                 float* y) const {
  const int64_t begin = std::max(first, shape_.first_row);
  const int64_t end = std::min(first + count, shape_.first_row + shape_.rows);
  const int64_t panel_bytes = int64_t{shape_.rank} * kPanelRows * kernels::element_bytes(b_.dtype);
  for (int64_t row = begin; row < end;) {
    const int64_t own = row - shape_.first_row, panel = own / kPanelRows;
    const int64_t stop = std::min(end, shape_.first_row + (panel + 1) * kPanelRows);
    alignas(64) float sums[kPanelRows] = {};
    table.rows_of(b_.dtype).weighted_sum(t, shape_.rank, b_.bytes.data() + panel * panel_bytes, sums,
                                         kPanelRows, 1, shape_.rank, kPanelRows);
    const float* sum = sums + own % kPanelRows;
    for (; row < stop; ++row) y[row - first] += *sum++;
  }
}

void MatrixAdapters::put(int adapter, std::shared_ptr<const LowRank> part) {
  for (const auto& other : parts(adapter)) {
    const LowRank::Shape &a = other->shape(), &b = part->shape();
    if (a.columns != b.columns ||
        (a.first_row < b.first_row + b.rows && b.first_row < a.first_row + a.rows)) {
      throw std::invalid_argument("adapter " + std::to_string(adapter) + " has a part for rows " +
                                  std::to_string(a.first_row) + " to " +
                                  std::to_string(a.first_row + a.rows) + " already");
    }
  }
  if (std::ssize(parts_) <= adapter) parts_.resize(static_cast<size_t>(adapter) + 1);
  max_rank_ = std::max(max_rank_, part->rank());
  Parts& own = parts_[static_cast<size_t>(adapter)];
  own.insert(std::upper_bound(own.begin(), own.end(), part, is_before), std::move(part));
}

void MatrixAdapters::drop(int adapter) {
  if (adapter < std::ssize(parts_)) parts_[static_cast<size_t>(adapter)].clear();
}

std::span<const std::shared_ptr<const LowRank>> MatrixAdapters::parts(int adapter) const {
  if (adapter < 0 || adapter >= std::ssize(parts_)) return {};
  return parts_[static_cast<size_t>(adapter)];
}

const LowRank* MatrixAdapters::part(int adapter, int64_t first_row) const {
  const auto own = parts(adapter);
  const auto found = std::partition_point(
      own.begin(), own.end(), [&](const auto& part) { return part->shape().first_row < first_row; });
  return found == own.end() || (*found)->shape().first_row != first_row ? nullptr : found->get();
}

int MatrixAdapters::width(int adapter) const {
  int ranks = 0;
  for (const auto& part : parts(adapter)) ranks += part->rank();
  return ranks;
}

bool MatrixAdapters::has_same_down(const MatrixAdapters& other, int adapter) const {
  const auto own = parts(adapter), theirs = other.parts(adapter);
  return own.size() == 1 && theirs.size() == 1 && own.front()->has_same_a(*theirs.front());
}

void MatrixAdapters::down(const kernels::KernelTable& table, int adapter, const float* x, int first,
                          int count, float* t) const {
  int begin = 0;  // the part's place in t
  for (const auto& part : parts(adapter)) {
    const int from = std::max(first, begin), end = std::min(first + count, begin + part->rank());
    if (from < end) part->down(table, x, from - begin, end - from, t + from);
    begin += part->rank();
  }
}

void MatrixAdapters::up(const kernels::KernelTable& table, int adapter, const float* t, int64_t first,
                        int64_t count, float* y) const {
  for (const auto& part : parts(adapter)) {
    part->up(table, t, first, count, y);
    t += part->rank();
  }
}

LowRankProduct::LowRankProduct(const MatrixAdapters* adapters, int64_t first, int M, int64_t columns)
    : adapters_(adapters), columns_(columns) {
  if (adapters == nullptr) return;
  of_row_ = adapters->rows().of(first, M);
  for (const int32_t adapter : of_row_) width_ = std::max(width_, adapters->width(adapter));
  if (width_ == 0) of_row_ = {};
  chunks_of_row_ = (width_ + kChunkRanks - 1) / kChunkRanks;
}

void LowRankProduct::down(const kernels::KernelTable& table, const InputRows& input, int64_t chunk,
                          float* temporary) const {
  const int64_t m = chunk / chunks_of_row_;
  const int adapter = of_row_[static_cast<size_t>(m)];
  const int first = static_cast<int>(chunk % chunks_of_row_) * kChunkRanks;
  const int count = std::min(kChunkRanks, adapters_->width(adapter) - first);
  if (count <= 0) return;
  adapters_->down(table, adapter, input.row(table, m, columns_, temporary), first, count, t_ + m * width_);
}

void LowRankProduct::up(const kernels::KernelTable& table, int m, int64_t first, int64_t count,
                        float* y) const {
  if (empty()) return;
  adapters_->up(table, of_row_[static_cast<size_t>(m)], t_ + int64_t{m} * width_, first, count, y);
}

}  // namespace twofold
