#include "moe/ranks/rank_worker.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

RankWorker::RankWorker(ThreadPool& pool, std::vector<std::shared_ptr<const PackedMatrix>> matrices,
                       ExpertStore* experts)
    : pool_(pool), matrices_(std::move(matrices)), store_(experts) {
  if (experts != nullptr) compute_.emplace(pool, *experts, kernels::Rounding::kOfLevel);
}

std::span<const float> RankWorker::run(std::span<const int32_t> job, std::span<const float> rows) {
  const RankJob kind = job.empty() ? RankJob::kStop : static_cast<RankJob>(job.front());
  if (kind == RankJob::kPing) return done();
  if (kind == RankJob::kLinear) return linear(job, rows);
  if (kind == RankJob::kExperts && compute_) return run_experts(job, rows);
  if (kind == RankJob::kPutAdapter && compute_) {
    const AdapterJob read = read_adapter_job(job, rows);
    store_->adapted.put(*store_, adapters_, read.place, read.adapter, read.part);
    return done();
  }
  if (kind == RankJob::kDropAdapter && job.size() == 2) {
    if (compute_) store_->adapted.drop(*store_, job[1]);
    return done();
  }
  throw std::invalid_argument("a job of rank 0 is damaged: this rank has no work of kind " +
                              std::to_string(static_cast<int>(kind)));
}

std::span<const float> RankWorker::linear(std::span<const int32_t> job, std::span<const float> rows) {
  if (job.size() < 3 || job[1] < 1) throw std::invalid_argument("a job of rank 0 is damaged: it has no rows");
  const int64_t M = job[1];
  const std::span<const int32_t> numbers = job.subspan(2);
  int64_t width = 0;
  for (const int32_t number : numbers) {
    if (number < 0 || static_cast<size_t>(number) >= matrices_.size())
      throw std::invalid_argument("a job of rank 0 is damaged: there is no such matrix");
    const PackedMatrix& w = *matrices_[static_cast<size_t>(number)];
    if (static_cast<int64_t>(rows.size()) != M * w.columns())
      throw std::invalid_argument("a job of rank 0 is damaged: " + std::to_string(rows.size()) +
                                  " numbers for " + std::to_string(M) + " rows of " +
                                  std::to_string(w.columns()));
    width += w.width();
  }
  answer_.resize(static_cast<size_t>(M * width));
  const auto lock = pool_.lock_scratch();
  float* to = answer_.data();
  for (const int32_t number : numbers) {
    const PackedMatrix& w = *matrices_[static_cast<size_t>(number)];
    own_linear(kernels::kernel_table(), pool_, {.x = rows.data(), .ld = w.columns()}, job[1], w, nullptr, to);
    to += M * w.width();
  }
  return answer_;
}

std::span<const float> RankWorker::run_experts(std::span<const int32_t> job, std::span<const float> rows) {
  const ExpertJob read = read_job(job, *store_);
  const size_t expected = static_cast<size_t>(read.num_tokens) * static_cast<size_t>(store_->shape().hidden);
  if (rows.size() != expected)
    throw std::invalid_argument("a job of rank 0 is damaged: " + std::to_string(rows.size()) +
                                " numbers for its tokens, expected " + std::to_string(expected));
  return compute_->run_job(job, rows.data());
}

}  // namespace twofold
