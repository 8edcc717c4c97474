#include "host/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/page_memory.h"

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

// The pool and index whose chunk this thread is running, for loops inside chunks.
struct Membership {
  const ThreadPool* pool = nullptr;
  int thread = 0;
};
thread_local Membership current;

void bind_to(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &set);
  }
  // If the system refuses (a cpuset that changed meanwhile), the thread runs unbound, which is only slower.
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

uint64_t stretch_word(int64_t next, int64_t end) {
  return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(next);
}
int64_t end_of(uint64_t word) { return static_cast<int64_t>(word >> 32); }
int64_t next_of(uint64_t word) { return static_cast<int64_t>(word & 0xffffffffu); }

constexpr auto no_body = [](int, int64_t, int) {};

}  // namespace

ThreadPool::ThreadPool(PoolPlan plan) : plan_(std::move(plan)), body_(no_body) {
  const int count = num_threads();
  limit_.store(count);
  stretches_ = std::make_unique<Stretch[]>(static_cast<size_t>(kMaxPhases * count));
  for (int thread = 0; thread < count; ++thread) {
    std::vector<int> visits(static_cast<size_t>(count));
    // Own stretch first, then the following ones in a circle, so that thieves spread; a stable sort moves the
    // own node's to the front.
    for (int i = 0; i < count; ++i) visits[static_cast<size_t>(i)] = (thread + i) % count;
    const auto same_node = [&](int other) { return node_of(other) == node_of(thread); };
    const auto others = std::stable_partition(visits.begin(), visits.end(), same_node);
    own_node_visits_.push_back(static_cast<int>(others - visits.begin()));
    visits_.push_back(std::move(visits));
  }
  workers_.reserve(static_cast<size_t>(count - 1));
  for (int thread = 1; thread < count; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::bind_caller() const { bind_to(plan_.threads.front().bound); }

void ThreadPool::work(int thread) {
  bind_to(plan_.threads[static_cast<size_t>(thread)].bound);
  uint32_t seen = 0;
  for (;;) {
    const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(changed)) {
      sleepers_.fetch_add(1);
      epoch_.wait(seen);
      sleepers_.fetch_sub(1);
    }
    // In this order: the destructor sets stopping_ before it changes the epoch, so a worker that has seen its
    // epoch sees that too. In the other order a worker that came from a loop could sleep on it for ever.
    seen = epoch_.load();
    if (stopping_.load()) return;
    run_chunks(thread);
  }
}

// A late worker may see the phases of the next loop, or only some of them: any chunk it takes belongs to a loop
// that waits for it.
void ThreadPool::run_chunks(int thread) {
  if (thread >= num_active()) return;
  const Membership before = std::exchange(current, {this, thread});
  const std::vector<int>& visits = visits_[static_cast<size_t>(thread)];
  const int num_phases = num_phases_.load(std::memory_order_acquire);
  const int num_visits = stealing_.load(std::memory_order_relaxed) == Stealing::kWithinNode
                             ? own_node_visits_[static_cast<size_t>(thread)]
                             : num_threads();
  uint32_t done = 0;
  for (int phase = 0; phase < num_phases; ++phase) {
    Stretch* of_phase = stretches(phase);
    for (int i = 0; i < num_visits; ++i) {
      done += run_stretch(of_phase[visits[static_cast<size_t>(i)]], phase, thread);
    }
  }
  current = before;
  if (done == 0) return;
  if (unfinished_.fetch_sub(done) == done && caller_sleeps_.load()) unfinished_.notify_all();
}

uint32_t ThreadPool::run_stretch(Stretch& stretch, int phase, int thread) {
  uint32_t done = 0;
  for (;;) {
    // Reading first keeps late threads from writing to a contended counter.
    uint64_t word = stretch.word.load(std::memory_order_acquire);
    if (next_of(word) >= end_of(word)) return done;
    word = stretch.word.fetch_add(1, std::memory_order_acq_rel);
    if (next_of(word) >= end_of(word)) return done;
    ++done;
    if (failed_.load(std::memory_order_relaxed)) continue;
    try {
      body_(phase, next_of(word), thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }
}

void ThreadPool::limit(int count) {
  if (count < 0 || count > num_threads() || (count > 0 && num_nodes() > 1)) {
    throw std::invalid_argument("ThreadPool: a limit of " + std::to_string(count) +
                                " threads was given; expected 0 to " + std::to_string(num_threads()) +
                                ", and one memory node");
  }
  const std::lock_guard turn(loop_mutex_);
  limit_.store(count == 0 ? num_threads() : count);
}

// Every node's chunks in equal parts to its threads, which are neighbours in the plan.
void ThreadPool::hand_out(const LoopPhase& phase, Stretch* of_phase) const {
  const int count = num_active();
  for (int i = count; i < num_threads(); ++i) of_phase[i].word.store(0, std::memory_order_release);
  int64_t first = 0;
  int begin = 0;
  while (begin < count) {
    int end = count;
    int64_t chunks = phase.num_chunks;
    if (phase.per_node != nullptr) {
      end = begin + 1;
      while (end < count && node_of(end) == node_of(begin)) ++end;
      chunks = phase.per_node[node_of(begin)];
    }
    for (int i = begin; i < end; ++i) {
      const int64_t from = first + chunks * (i - begin) / (end - begin);
      const int64_t to = first + chunks * (i + 1 - begin) / (end - begin);
      of_phase[i].word.store(stretch_word(from, to), std::memory_order_release);
    }
    first += chunks;
    begin = end;
  }
}

void ThreadPool::parallel_for(int64_t num_chunks, Body body) {
  const LoopPhase phase{num_chunks};
  parallel_phases({&phase, 1}, [&](int, int64_t chunk, int thread) { body(chunk, thread); });
}

void ThreadPool::parallel_phases(std::span<const LoopPhase> phases, PhasesBody body, Stealing stealing) {
  if (phases.size() > size_t{kMaxPhases}) {
    throw std::invalid_argument("ThreadPool: a loop of " + std::to_string(phases.size()) +
                                " phases; expected at most " + std::to_string(kMaxPhases));
  }
  int64_t total = 0;
  for (const LoopPhase& phase : phases) {
    if (phase.num_chunks < 0 || phase.num_chunks > kMaxChunks - total) {
      throw std::invalid_argument("ThreadPool: num_chunks is " + std::to_string(phase.num_chunks) +
                                  "; expected 0 to " + std::to_string(kMaxChunks));
    }
    total += phase.num_chunks;
  }
  const auto run_inline = [&](int thread) {
    for (size_t p = 0; p < phases.size(); ++p) {
      for (int64_t chunk = 0; chunk < phases[p].num_chunks; ++chunk) body(static_cast<int>(p), chunk, thread);
    }
  };
  if (current.pool == this) return run_inline(current.thread);
  const std::lock_guard turn(loop_mutex_);
  failed_.store(false, std::memory_order_relaxed);
  if (total <= 1 || num_active() == 1) {
    const Membership before = std::exchange(current, {this, 0});
    try {
      run_inline(0);
    } catch (...) {
      current = before;
      throw;
    }
    current = before;
    return;
  }
  body_ = body;
  stealing_.store(stealing, std::memory_order_relaxed);
  unfinished_.store(static_cast<uint32_t>(total), std::memory_order_relaxed);
  num_phases_.store(static_cast<int>(phases.size()), std::memory_order_relaxed);
  for (size_t p = 0; p < phases.size(); ++p) hand_out(phases[p], stretches(static_cast<int>(p)));
  epoch_.fetch_add(1);
  if (sleepers_.load() > 0) epoch_.notify_all();
  run_chunks(0);
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (!finished() && !spin_until(finished)) {
    caller_sleeps_.store(true);
    for (uint32_t left = unfinished_.load(); left != 0; left = unfinished_.load()) unfinished_.wait(left);
    caller_sleeps_.store(false);
  }
  if (failed_.load()) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Countdown::wait(const ThreadPool& pool) const {
  const auto over = [&] { return left_.load(std::memory_order_acquire) <= 0 || pool.failed(); };
  // The chunk waited for is normally on a running thread, and nearly done.
  while (!spin_until(over)) std::this_thread::sleep_for(kSpin);
}

void ThreadPool::FreeDeleter::operator()(std::byte* p) const { std::free(p); }

std::byte* ThreadPool::scratch(int slot, int64_t bytes) {
  Scratch& buffer = scratch_[slot];
  if (buffer.size < bytes) {
    const auto rounded = static_cast<int64_t>(round_up(static_cast<size_t>(bytes), kCacheLine));
    buffer.data.reset();
    buffer.size = 0;
    buffer.data.reset(static_cast<std::byte*>(std::aligned_alloc(kCacheLine, static_cast<size_t>(rounded))));
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.size = rounded;
  }
  return buffer.data.get();
}

}  // namespace twofold
