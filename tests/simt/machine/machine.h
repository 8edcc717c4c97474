// One block's threads as fibres. A host thread has one machine.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernel_side.h"
#include "machine/clocks.h"
#include "machine/fibre_switch.h"
#include "simt.h"
#include "traffic.h"

namespace simt {

inline constexpr int kWarp = 32, kMostThreads = 1024;
// Five lines of cache apart from a power of two: tops of stacks do not push one another out of the same sets.
inline constexpr size_t kStackBytes = 128 * 1024 + 5 * 64;
inline constexpr size_t kSharedRoom = kMostShared + 4096;  // gaps between a block's objects included

struct Waiting {
  Meeting how = Meeting::kNone;
  uint32_t mask = 0;
  int line = 0;
  int operand = 0;  // operand of an exchange; number of threads of a block barrier
  int id = 0;
  uint64_t value = 0;
  const uint32_t *a = nullptr, *b = nullptr;
  float* c = nullptr;
};

// A copy that was begun and not waited for.
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  bool there;
  uint64_t source_writes[4];
};

struct Fibre {
  enum class State : uint8_t { kReady, kWaiting, kDone };
  Context context;
  bool begun = false;
  State state = State::kDone;
  Waiting at;
  Index index{};
  Known known;
  std::deque<std::vector<Copy>> copies;  // the last group is open
};

class Machine {
 public:
  static Machine& of_this_thread();
  ~Machine();

  int launch(const Kernel& kernel, Index grid, Index block, int64_t shared_bytes, Session* session);

  const std::string& report() const { return report_; }

  // Called by fibres.
  void meet(const Waiting& waiting);
  void* static_memory(const void* key, size_t bytes, size_t alignment);
  void begin_copy(uint8_t* shared, const uint8_t* global, bool there);
  void close_copies();
  void wait_copies(int left);
  // Ends the launch with a report: who, then what.
  [[noreturn]] void fail(const std::string& what, int error = 719);

  Fibre& self() { return *fibres_[size_t(running_)]; }
  int thread() const { return running_; }
  Fibre& fibre(int thread) { return *fibres_[size_t(thread)]; }
  int num_threads() const { return num_threads_; }
  int64_t block_number() const { return block_number_; }
  bool on_stack(const void* p) const {
    return size_t(static_cast<const uint8_t*>(p) - stacks_) < stack_bytes_;
  }
  bool in_arguments(const void* p) const {
    return size_t(static_cast<const uint8_t*>(p) - static_cast<const uint8_t*>(kernel_->arguments)) <
           kernel_->argument_bytes;
  }
  bool in_shared(const void* p) const {
    return size_t(static_cast<const uint8_t*>(p) - shared_) < kSharedRoom;
  }
  std::string name_of_thread(int thread) const;

  Shadow* shadow = nullptr;  // null: no access checks
  TrafficMeter* meter = nullptr;
  Index grid{}, block{}, block_at{};
  uint8_t* shared_ = nullptr;
  int64_t dynamic_bytes = 0;

 private:
  Machine();
  static void enter();
  void note(const std::string& what, int error);
  void prepare(int num_threads);
  bool run_block();
  void resume(int thread);
  void leave();
  void complete_block_barrier(const Waiting& waiting);
  void complete_warp(int first, const Waiting& waiting);
  void complete_exchange(int first, const Waiting& waiting);
  void exited(int thread);
  void report_deadlock();
  uint32_t random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return uint32_t(random_ >> 16);
  }

  std::vector<std::unique_ptr<Fibre>> fibres_;
  uint8_t* stacks_ = nullptr;
  size_t stack_bytes_ = 0;
  Context scheduler_;
  const Kernel* kernel_ = nullptr;
  std::string name_, report_;
  int num_threads_ = 0, running_ = -1, num_done_ = 0;
  int num_waiting_ = 0;  // at barriers of the block
  int waiting_of_warp_[kMostThreads / kWarp] = {};
  int64_t block_number_ = 0;
  int error_ = 0;
  uint64_t random_ = 1;
  struct Static {
    const void* key;
    size_t at;
    size_t bytes;
  };
  std::vector<Static> statics_;
  size_t shared_end_ = 0;
  int64_t static_bytes_ = 0, shared_limit_ = 0;
};

// The block that the calling thread runs; null between launches.
extern thread_local constinit Machine* running_machine;

std::string name_of(const Kernel& kernel);
int launch_bound(const void* function);  // threads; 0: none is declared
std::string name_of(Meeting how, int line);

}  // namespace simt
