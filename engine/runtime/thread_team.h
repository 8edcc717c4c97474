// A team of threads that shares the chunks of one parallel loop at a time.
//
// The calling thread works too. Idle workers spin for some tens of microseconds, so that the next loop of a
// decode step finds them awake, then sleep in the kernel: an idle team uses no CPU. Chunks are taken from one
// atomic counter, so a thread that the operating system has set aside costs the chunk it holds and nothing
// else: a worker that has not woken yet is never waited for.
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
#include <thread>
#include <vector>

#include "function_ref.h"

namespace twofold {

class ThreadTeam {
 public:
  using Body = FunctionRef<void(int64_t chunk, int thread)>;

  static constexpr int kMaxThreads = 1024;
  static constexpr int64_t kMaxChunks = int64_t{1} << 31;

  // `num_threads` counts the caller; 0 means one per physical core this process may use (affinity, cgroup
  // quota). `pin` binds worker i to the i-th of these cores (never the caller, whose thread is not ours).
  // Throws std::invalid_argument outside 0...kMaxThreads.
  explicit ThreadTeam(int num_threads, bool pin = false);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(chunk, thread) once for every chunk in [0, num_chunks), thread being in [0, num_threads()) and
  // used by one thread at a time. Returns when all are done. The first exception is rethrown here; chunks not
  // begun by then are skipped. Throws std::invalid_argument for a number of chunks outside [0, kMaxChunks].
  void parallel_for(int64_t num_chunks, Body body);

  // Buffers shared by the operations that run on this team, one after the other; they grow and are kept. Hold
  // the lock as long as the buffers are in use.
  std::unique_lock<std::mutex> lock_scratch() { return std::unique_lock(scratch_mutex_); }
  float* scratch(int slot, int64_t num_floats);
  static constexpr int kNumScratchSlots = 4;

 private:
  void work(int thread, int core);
  void run_chunks(int thread, uint64_t ticket);
  void run_inline(int64_t num_chunks, Body body, int thread);

  // What the loop is: written before a ticket is issued, read only by holders of one of its chunks.
  Body body_;
  std::exception_ptr error_;
  std::mutex loop_mutex_;

  // Upper half: chunks in the current loop; lower half: the next one to take. One word, so that a late worker
  // sees either nothing to do or a chunk of a loop that cannot end without it.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // changes when there is something to wake for
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> failed_{false};

  struct FreeDeleter {
    void operator()(float* p) const;
  };
  struct Scratch {
    std::unique_ptr<float, FreeDeleter> data;
    int64_t size = 0;
  };
  std::mutex scratch_mutex_;
  Scratch scratch_[kNumScratchSlots];
  std::vector<std::thread> workers_;
};

// The logical CPUs this process may use, one per physical core, cut to the cgroup's CPU quota (at least one).
std::vector<int> usable_cores();

}  // namespace twofold
