#include "host/ranks.h"

#include <exception>
#include <stdexcept>
#include <utility>

namespace twofold {

Ranks::Ranks(int rank, int size) : rank_(rank), size_(size) {
  if (size < 2 || rank < 0 || rank >= size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                " was given; expected at least two ranks, and a rank among them");
  }
}

Ranks::JobLock::JobLock(Ranks& ranks, std::unique_lock<std::mutex> lock)
    : ranks_(ranks), lock_(std::move(lock)), num_exceptions_(std::uncaught_exceptions()) {
  if (!ranks_.failure_.empty()) throw RankFailure(ranks_.failure_);
}

Ranks::JobLock::~JobLock() {
  if (std::uncaught_exceptions() > num_exceptions_)
    ranks_.fail("an earlier step over ranks was interrupted; restart all ranks");
}

void Ranks::ping() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const JobLock turn(*this, std::move(lock));
  const int32_t job[] = {static_cast<int32_t>(RankJob::kPing)};
  for (int to = 1; to < size_; ++to) send_job(to, job, {});
  for (int from = 1; from < size_; ++from) {
    float sign;
    receive(from, {&sign, 1});
  }
}

std::span<float> Ranks::buffer(int64_t num_floats) {
  if (buffer_.size() < static_cast<size_t>(num_floats)) buffer_.resize(static_cast<size_t>(num_floats));
  return {buffer_.data(), static_cast<size_t>(num_floats)};
}

}  // namespace twofold
