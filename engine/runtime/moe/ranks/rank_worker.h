// The jobs of a rank other than 0: products of its share of the matrices and of its experts.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "moe/expert_compute.h"
#include "ops/packed_matrix.h"

namespace twofold {

class RankWorker {
 public:
  // experts: null for a model without any. Neither pool nor experts are owned.
  RankWorker(ThreadPool& pool, std::vector<std::shared_ptr<const PackedMatrix>> matrices,
             ExpertStore* experts);

  // The answer to a job, whose rows are what rank 0 sent with it; valid until the next call. Throws
  // std::invalid_argument for a damaged job, or one that this rank holds no weights for.
  std::span<const float> run(std::span<const int32_t> job, std::span<const float> rows);

 private:
  std::span<const float> linear(std::span<const int32_t> job, std::span<const float> rows);
  std::span<const float> run_experts(std::span<const int32_t> job, std::span<const float> rows);
  std::span<const float> done() { return answer_.assign(1, 1.0f), answer_; }

  ThreadPool& pool_;
  std::vector<std::shared_ptr<const PackedMatrix>> matrices_;
  ExpertStore* store_;
  std::optional<ExpertCompute> compute_;
  std::shared_ptr<AdapterRows> adapters_ = std::make_shared<AdapterRows>();  // jobs bring their own
  std::vector<float> answer_;
};

}  // namespace twofold
