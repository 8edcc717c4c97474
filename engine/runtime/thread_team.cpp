#include "thread_team.h"

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

namespace twofold {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready()` or the time is up; true when ready. The clock is read rarely: it costs as much as
// some pauses.
template <class Ready>
bool spin_until(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      pause();
    }
    if (std::chrono::steady_clock::now() >= end) return false;
  }
}

// The team and index whose chunk this thread is running, for loops inside chunks.
struct Membership {
  const ThreadTeam* team = nullptr;
  int thread = 0;
};
thread_local Membership current;

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(core), &set);
  // A refusal (a cpuset that changed meanwhile) leaves the thread where the system wants it, which is only
  // slower.
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

uint64_t make_ticket(int64_t num_chunks) { return static_cast<uint64_t>(num_chunks) << 32; }
uint64_t chunks_of(uint64_t ticket) { return ticket >> 32; }
uint64_t next_of(uint64_t ticket) { return ticket & 0xffffffffu; }

constexpr auto no_body = [](int64_t, int) {};

}  // namespace

ThreadTeam::ThreadTeam(int num_threads, bool pin) : body_(no_body) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw std::invalid_argument("ThreadTeam: num_threads is " + std::to_string(num_threads) +
                                "; expected 0 (one per physical core) to " + std::to_string(kMaxThreads));
  }
  const std::vector<int> cores = num_threads == 0 || pin ? usable_cores() : std::vector<int>{};
  const int count = num_threads == 0 ? static_cast<int>(cores.size()) : num_threads;
  workers_.reserve(static_cast<size_t>(count - 1));
  for (int thread = 1; thread < count; ++thread) {
    const int core = pin ? cores[static_cast<size_t>(thread) % cores.size()] : -1;
    workers_.emplace_back([this, thread, core] { work(thread, core); });
  }
}

ThreadTeam::~ThreadTeam() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::work(int thread, int core) {
  if (core >= 0) pin_to(core);
  uint32_t seen = 0;
  for (;;) {
    const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(changed)) {
      sleepers_.fetch_add(1);
      epoch_.wait(seen);
      sleepers_.fetch_sub(1);
    }
    if (stopping_.load()) return;
    seen = epoch_.load(std::memory_order_acquire);
    // Looking first keeps a worker that comes too late from touching a counter others are busy with.
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (next_of(ticket) < chunks_of(ticket))
      run_chunks(thread, ticket_.fetch_add(1, std::memory_order_acq_rel));
  }
}

void ThreadTeam::run_chunks(int thread, uint64_t ticket) {
  const Membership before = current;
  current = {this, thread};
  uint32_t done = 0;
  while (next_of(ticket) < chunks_of(ticket)) {
    if (!failed_.load(std::memory_order_relaxed)) {
      try {
        body_(static_cast<int64_t>(next_of(ticket)), thread);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    }
    ++done;
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
  }
  current = before;
  if (done == 0) return;
  if (unfinished_.fetch_sub(done) == done && caller_sleeps_.load()) unfinished_.notify_all();
}

void ThreadTeam::run_inline(int64_t num_chunks, Body body, int thread) {
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk, thread);
}

void ThreadTeam::parallel_for(int64_t num_chunks, Body body) {
  if (num_chunks < 0 || num_chunks > kMaxChunks) {
    throw std::invalid_argument("ThreadTeam: num_chunks is " + std::to_string(num_chunks) +
                                "; expected 0 to " + std::to_string(kMaxChunks));
  }
  if (current.team == this) return run_inline(num_chunks, body, current.thread);
  const std::lock_guard turn(loop_mutex_);
  if (num_chunks <= 1 || workers_.empty()) {
    const Membership before = std::exchange(current, {this, 0});
    try {
      run_inline(num_chunks, body, 0);
    } catch (...) {
      current = before;
      throw;
    }
    current = before;
    return;
  }
  body_ = body;
  failed_.store(false, std::memory_order_relaxed);
  unfinished_.store(static_cast<uint32_t>(num_chunks), std::memory_order_relaxed);
  ticket_.store(make_ticket(num_chunks));
  epoch_.fetch_add(1);
  if (sleepers_.load() > 0) epoch_.notify_all();
  run_chunks(0, ticket_.fetch_add(1, std::memory_order_acq_rel));
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (!finished() && !spin_until(finished)) {
    caller_sleeps_.store(true);
    for (uint32_t left = unfinished_.load(); left != 0; left = unfinished_.load()) unfinished_.wait(left);
    caller_sleeps_.store(false);
  }
  if (failed_.load()) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadTeam::FreeDeleter::operator()(float* p) const { std::free(p); }

float* ThreadTeam::scratch(int slot, int64_t num_floats) {
  Scratch& buffer = scratch_[slot];
  if (buffer.size < num_floats) {
    const int64_t rounded = (num_floats + 15) / 16 * 16;
    buffer.data.reset();
    buffer.size = 0;
    buffer.data.reset(
        static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(rounded) * sizeof(float))));
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.size = rounded;
  }
  return buffer.data.get();
}

}  // namespace twofold
