#include "moe/adapted_experts.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "moe/expert_store.h"

namespace twofold {
namespace {

void expect_fits(const ExpertStore& store, const ExpertPlace& place, int adapter, const LowRank& part) {
  const auto [layer, expert, matrix] = place;
  const LowRank::Shape& shape = part.shape();
  const bool exists = layer >= 0 && layer < store.num_layers() && expert >= 0 &&
                      expert < store.num_experts() && matrix >= 0 && matrix <= 2 && adapter >= 0;
  const int64_t hidden = store.shape().hidden;
  const int64_t inner = exists ? store.layout(layer, expert).intermediate : store.shape().intermediate;
  const int64_t num_rows = matrix == 2 ? hidden : inner, columns = matrix == 2 ? inner : hidden;
  if (exists && shape.first_row + shape.rows <= num_rows && shape.columns == columns) return;
  throw std::invalid_argument("an adapter for rows " + std::to_string(shape.first_row) + " to " +
                              std::to_string(shape.first_row + shape.rows) + " of " +
                              std::to_string(shape.columns) + " columns of matrix " + std::to_string(matrix) +
                              ", expert " + std::to_string(expert) + ", layer " + std::to_string(layer) +
                              "; the matrix is " + std::to_string(num_rows) + " x " +
                              std::to_string(columns) + " of " + std::to_string(store.num_experts()) +
                              " experts in " + std::to_string(store.num_layers()) + " layers");
}

}  // namespace

double AdaptedExperts::bytes_per_expert(int num_rows) const {
  double bytes = 0;
  for (const int32_t adapter : rows_ == nullptr ? std::span<const int32_t>{} : of_rows(num_rows)) {
    if (adapter >= 0 && adapter < std::ssize(bytes_)) bytes += bytes_[size_t(adapter)];
  }
  return num_rows == 0 ? 0 : bytes / num_rows;
}

void AdaptedExperts::put(const ExpertStore& store, const std::shared_ptr<const AdapterRows>& rows,
                         const ExpertPlace& place, int adapter, std::shared_ptr<const LowRank> part) {
  expect_fits(store, place, adapter, *part);
  const auto [layer, expert, matrix] = place;
  Ranks* const ranks = store.ranks();
  for (int rank = 1; ranks != nullptr && ranks->rank() == 0 && rank < ranks->size(); ++rank) {
    if ((store.holders(layer, expert) >> rank & 1) != 0) send_adapter(*ranks, rank, place, adapter, *part);
  }
  rows_ = rows;
  if (std::ssize(bytes_) <= adapter) bytes_.resize(size_t(adapter) + 1);
  bytes_[size_t(adapter)] += double(part->bytes()) / (double(store.num_layers()) * store.num_experts());
  if (store.expert(layer, expert) == nullptr) return;
  num_experts_ = size_t(store.num_experts());
  experts_.resize(size_t(store.num_layers()) * num_experts_);
  std::unique_ptr<ExpertAdapters>& own = experts_[size_t(layer) * num_experts_ + size_t(expert)];
  if (own == nullptr) own = std::make_unique<ExpertAdapters>(rows);
  (matrix == 0 ? own->gate : matrix == 1 ? own->up : own->down).put(adapter, std::move(part));
}

void AdaptedExperts::drop(const ExpertStore& store, int adapter) {
  if (store.ranks() != nullptr && store.ranks()->rank() == 0) send_drop(*store.ranks(), adapter);
  if (adapter < std::ssize(bytes_)) bytes_[size_t(adapter)] = 0;
  for (const std::unique_ptr<ExpertAdapters>& own : experts_) {
    if (own == nullptr) continue;
    for (MatrixAdapters* matrix : {&own->gate, &own->up, &own->down}) matrix->drop(adapter);
  }
}

}  // namespace twofold
