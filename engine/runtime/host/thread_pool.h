// A thread pool that runs one parallel loop at a time and shares out its chunks.
//
// The calling thread works too. Idle workers spin for some tens of microseconds, so that the next loop of a
// decode step starts without a wake-up, then sleep in the kernel: an idle pool uses no CPU. Every thread has a
// stretch of neighbouring chunks, which it takes one by one from an atomic counter. A thread that has finished
// its stretch takes chunks from the others', those of its own memory node first. So a thread preempted by the
// operating system delays only the chunk it holds, and a worker that has not woken yet is never waited for.
//
// One loop runs at a time; calls from several threads take turns. A call from inside a chunk runs its loop at
// once on the thread it is on. Which thread runs which chunk is not determined; results must not depend on
// it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "host/function_ref.h"
#include "host/pool_plan.h"

namespace twofold {

// One part of a loop. With `per_node` (as many entries as the pool has nodes, summing to num_chunks) the
// chunks are those of node 0 first, then of node 1, ...; threads prefer their node's. Without, nothing is
// preferred.
struct LoopPhase {
  int64_t num_chunks;
  const int64_t* per_node = nullptr;
};

enum class Stealing : uint8_t { kAnywhere, kWithinNode };

class ThreadPool {
 public:
  using Body = FunctionRef<void(int64_t chunk, int thread)>;
  using PhasesBody = FunctionRef<void(int phase, int64_t chunk, int thread)>;

  static constexpr int64_t kMaxChunks = int64_t{1} << 31;
  static constexpr int kMaxPhases = 5;

  explicit ThreadPool(PoolPlan plan);
  // `num_threads` counts the caller; 0 means one per physical core this process may use. Bound to nothing.
  explicit ThreadPool(int num_threads) : ThreadPool(plan_pool(num_threads, "off")) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(plan_.threads.size()); }
  int num_nodes() const { return plan_.num_nodes; }
  int node_of(int thread) const { return plan_.threads[static_cast<size_t>(thread)].node; }
  const PoolPlan& plan() const { return plan_; }
  // Binds the calling thread, which will call parallel_for from now on, as the plan specifies for thread 0.
  void bind_caller() const;

  // Calls body(chunk, thread) once for every chunk in [0, num_chunks), thread being in [0, num_threads()) and
  // used by one thread at a time. Returns when all are done. The first exception is rethrown here; chunks not
  // begun by then are skipped. Throws std::invalid_argument for a number of chunks outside [0, kMaxChunks].
  void parallel_for(int64_t num_chunks, Body body);

  // Several loops under one fork and join. A thread begins a phase when all chunks of the phases before it
  // have been taken, which is not to say finished: a body that needs a result of an earlier phase waits for
  // it with a Countdown. At most kMaxPhases phases and kMaxChunks chunks in all.
  void parallel_phases(std::span<const LoopPhase> phases, PhasesBody body,
                       Stealing stealing = Stealing::kAnywhere);

  // Limits loops to the first `count` threads from now on, 1 <= count <= num_threads(); 0: all, the initial
  // state. A thread that is still awake may help with a chunk. Not with several nodes, whose chunks are their
  // threads'.
  void limit(int count);

  // Whether an exception has ended the current loop.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  // Buffers shared by the operations that run on this pool, one after the other; they grow and are kept. Hold
  // the lock as long as the buffers are in use. Aligned to a cache line.
  std::unique_lock<std::mutex> lock_scratch() { return std::unique_lock(scratch_mutex_); }
  std::byte* scratch(int slot, int64_t bytes);
  float* scratch_floats(int slot, int64_t num_floats) {
    return reinterpret_cast<float*>(scratch(slot, num_floats * static_cast<int64_t>(sizeof(float))));
  }
  static constexpr int kNumScratchBuffers = 6;

 private:
  // The chunks [next, end) of a thread's stretch: end in the upper half, next in the lower. One word, so that
  // a late worker sees either nothing to do or a chunk of a loop that cannot end without it.
  struct alignas(64) Stretch {
    std::atomic<uint64_t> word{0};
  };

  void work(int thread);
  void run_chunks(int thread);
  uint32_t run_stretch(Stretch& stretch, int phase, int thread);
  void hand_out(const LoopPhase& phase, Stretch* stretches) const;
  int num_active() const { return limit_.load(std::memory_order_relaxed); }
  Stretch* stretches(int phase) const { return stretches_.get() + phase * num_threads(); }

  PoolPlan plan_;
  std::vector<std::vector<int>> visits_;  // per thread: whose stretches it empties, in this order
  std::vector<int> own_node_visits_;      // per thread: how many of these are of its own node

  // What the loop is: written before a chunk is handed out, read only by holders of one.
  PhasesBody body_;
  std::exception_ptr error_;
  std::mutex loop_mutex_;
  std::unique_ptr<Stretch[]> stretches_;  // [kMaxPhases][num_threads]

  alignas(64) std::atomic<uint32_t> epoch_{0};  // changes when sleeping workers must wake
  std::atomic<int> num_phases_{0};
  std::atomic<Stealing> stealing_{Stealing::kAnywhere};
  std::atomic<int> limit_{1};  // threads that take part
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> failed_{false};

  struct FreeDeleter {
    void operator()(std::byte* p) const;
  };
  struct Scratch {
    std::unique_ptr<std::byte, FreeDeleter> data;
    int64_t size = 0;
  };
  std::mutex scratch_mutex_;
  Scratch scratch_[kNumScratchBuffers];
  std::vector<std::thread> workers_;
};

// Counts down finished chunks; a later phase that needs their results waits on it.
class alignas(64) Countdown {
 public:
  void start(int chunks) { left_.store(chunks, std::memory_order_relaxed); }
  void add(int chunks) { left_.fetch_add(chunks, std::memory_order_relaxed); }
  // True for the last chunk, which sees all writes of the others.
  bool done() { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  // Returns when the count is zero, or at once when the loop has failed (its results are unusable then).
  void wait(const ThreadPool& pool) const;

 private:
  std::atomic<int> left_{0};
};

}  // namespace twofold
