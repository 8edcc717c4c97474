// Time spent in each kind of native work in this process: two clock readings per operation, always on.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace twofold {

enum class Work : uint8_t {
  kEmbedding,
  kQkv,         // norm, queries, keys and values
  kKeysValues,  // per-head norms, rotation, into the cache
  kAttention,   // scores, softmax, weighted values
  kOutput,      // attention's output projection
  kRouter,
  kExperts,
  kDenseFfn,
  kHead,
};
inline constexpr const char* kWorkNames[] = {"embedding", "qkv",     "keys_values", "attention", "output",
                                             "router",    "experts", "dense_ffn",   "head"};
inline constexpr int kNumWorks = static_cast<int>(sizeof kWorkNames / sizeof kWorkNames[0]);

// Nanoseconds since the process began. Operations of several pools at once add up.
inline std::atomic<int64_t> work_ns[kNumWorks];

class WorkTimer {
 public:
  explicit WorkTimer(Work work) : work_(work), begin_(std::chrono::steady_clock::now()) {}
  ~WorkTimer() { add(); }
  WorkTimer(const WorkTimer&) = delete;
  WorkTimer& operator=(const WorkTimer&) = delete;
  // Ends the current kind of work and begins the next.
  void next(Work work) {
    begin_ = add();
    work_ = work;
  }

 private:
  std::chrono::steady_clock::time_point add() const {
    const auto now = std::chrono::steady_clock::now();
    const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(now - begin_);
    work_ns[static_cast<int>(work_)].fetch_add(taken.count(), std::memory_order_relaxed);
    return now;
  }

  Work work_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace twofold
