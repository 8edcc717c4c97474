// Adapters of routed experts (ops/low_rank.h): they belong to an expert, wherever its weights are read from.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moe/ranks/rank_adapters.h"
#include "ops/low_rank.h"

namespace twofold {

class ExpertStore;

// The adapters' parts of one expert's matrices.
struct ExpertAdapters {
  explicit ExpertAdapters(const std::shared_ptr<const AdapterRows>& rows)
      : gate(rows), up(rows), down(rows) {}
  MatrixAdapters gate, up, down;
};

class AdaptedExperts {
 public:
  // Null: no adapter changes the expert.
  const ExpertAdapters* of(int layer, int expert) const {
    return experts_.empty() ? nullptr : experts_[size_t(layer) * num_experts_ + size_t(expert)].get();
  }
  // Adapter of each of num_rows rows of a step; see AdapterRows::of.
  std::span<const int32_t> of_rows(int num_rows) const {
    return rows_ == nullptr ? std::span<const int32_t>{} : rows_->of(0, num_rows);
  }

  // Bytes that the adapters of num_rows rows of a step have in an expert that a row uses: the mean over the rows of the
  // mean over all experts. 0 where no row uses one.
  double bytes_per_expert(int num_rows) const;

  // `store` is the one that this belongs to. Between two steps only; rank 0 also sends the part to the other ranks that hold
  // the expert, and lets them drop it. Throws std::invalid_argument for an expert or a matrix that does not exist, or
  // another shape; RankFailure.
  void put(const ExpertStore& store, const std::shared_ptr<const AdapterRows>& rows, const ExpertPlace& place,
           int adapter, std::shared_ptr<const LowRank> part);
  void drop(const ExpertStore& store, int adapter);

 private:
  size_t num_experts_ = 0;                                // in a layer
  std::vector<std::unique_ptr<ExpertAdapters>> experts_;  // [layers, experts]; empty: no adapter was put
  std::shared_ptr<const AdapterRows> rows_;
  std::vector<double> bytes_;  // by adapter: mean over the experts
};

}  // namespace twofold
