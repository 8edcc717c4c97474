// Ranks: processes that each hold a share of one model's weights. Rank 0 computes the model; it sends the other ranks
// rows of activations and receives their products. A rank other than 0 keeps no state between two jobs.
#pragma once
#include <cstdint>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace twofold {

// The first number of a job: what a rank does with the rows that follow it.
enum class RankJob : int32_t { kStop, kPing, kLinear, kExperts, kPutAdapter, kDropAdapter };

// A rank was lost, or does not answer; the text names it.
struct RankFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Ranks {
 public:
  // Throws std::invalid_argument unless 0 <= rank < size and size > 1.
  Ranks(int rank, int size);
  virtual ~Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Messages, called under the lock. A rank receives what another one sent in the order of sending, and knows the
  // sizes: of a job from its header. Throw RankFailure, which names the other rank, when it is lost or silent for too
  // long.
  virtual void send_job(int to, std::span<const int32_t> job, std::span<const float> rows) = 0;
  virtual void receive(int from, std::span<float> rows) = 0;

  // One job at a time. A job that an exception ends leaves messages behind, so no other one can follow.
  class JobLock {
   public:
    JobLock(Ranks& ranks, std::unique_lock<std::mutex> lock);
    ~JobLock();
    JobLock(const JobLock&) = delete;
    JobLock& operator=(const JobLock&) = delete;

   private:
    Ranks& ranks_;
    std::unique_lock<std::mutex> lock_;
    int num_exceptions_;
  };
  // Throws RankFailure after a failure, with its text.
  JobLock lock() { return JobLock(*this, std::unique_lock(mutex_)); }
  // Asks every rank for a sign of life, unless a job is running. Throws as receive.
  void ping();
  // Memory for messages, valid until the next call. The caller holds the lock.
  std::span<float> buffer(int64_t num_floats);

 protected:
  // Every later job throws RankFailure with this text.
  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = text;
  }

 private:
  int rank_, size_;
  std::mutex mutex_;
  std::string failure_;
  std::vector<float> buffer_;
};

}  // namespace twofold
