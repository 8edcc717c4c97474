// Fibres and their turns.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "machine/machine.h"
#include "machine/shadow.h"

namespace simt {

thread_local constinit Machine* running_machine = nullptr;

Machine& Machine::of_this_thread() {
  static thread_local const std::unique_ptr<Machine> machine(new Machine);
  return *machine;
}

Machine::Machine() {
  stack_bytes_ = kStackBytes * kMostThreads;
  const auto map = [](size_t bytes) {
    void* at =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return static_cast<uint8_t*>(at);
  };
  stacks_ = map(stack_bytes_);
  shared_ = map(kSharedRoom);
}

Machine::~Machine() {
  munmap(stacks_, stack_bytes_);
  munmap(shared_, kSharedRoom);
}

void Machine::enter() {
  Machine& machine = *running_machine;
  for (;;) {  // a fibre runs one thread after the other
    machine.kernel_->call(machine.kernel_->arguments);
    machine.exited(machine.running_);
    machine.leave();
  }
}

void Machine::resume(int thread) {
  running_ = thread;
  Fibre& fibre = *fibres_[size_t(thread)];
  if (!fibre.begun)
    begin_on(stacks_ + kStackBytes * size_t(thread), kStackBytes, &Machine::enter, fibre.context);
  fibre.begun = true;
  change(scheduler_, fibre.context);
  running_ = -1;
}

void Machine::leave() { change(fibres_[size_t(running_)]->context, scheduler_); }

void Machine::note(const std::string& what, int error) {
  report_ = name_ + ", " + name_of_thread(running_) + ": " + what;
  error_ = error;
}

void Machine::fail(const std::string& what, int error) {
  note(what, error);
  leave();
  __builtin_unreachable();  // the fibre restarts
}

void Machine::prepare(int num_threads) {
  num_threads_ = num_threads;
  while (int(fibres_.size()) < num_threads) fibres_.push_back(std::make_unique<Fibre>());
}

int Machine::launch(const Kernel& kernel, Index grid_size, Index block_size, int64_t shared_bytes,
                    Session* session) {
  const int64_t threads = int64_t(block_size.x) * block_size.y * block_size.z;
  const int64_t blocks = int64_t(grid_size.x) * grid_size.y * grid_size.z;
  const int64_t most_shared = session == nullptr ? kLeastMostShared : session->most_shared;
  const int bound = launch_bound(kernel.function);
  report_.clear();
  if (threads < 1 || threads > kMostThreads || blocks < 1 || shared_bytes < 0 || shared_bytes > most_shared ||
      grid_size.y > 65535 || grid_size.z > 65535) {
    report_ = name_of(kernel) + ": a launch that no device takes (blocks " + std::to_string(blocks) +
              ", threads " + std::to_string(threads) + ", shared bytes " + std::to_string(shared_bytes) + ")";
  } else if (bound > 0 && threads > bound) {
    report_ = name_of(kernel) + ": " + std::to_string(threads) + " threads are more than the " +
              std::to_string(bound) + " of its launch bounds";
  }
  if (!report_.empty()) {
    if (session != nullptr) session->report_ = report_;
    return 1;
  }
  Machine* before = running_machine;
  kernel_ = &kernel;
  name_ = name_of(kernel);
  grid = grid_size;
  block = block_size;
  dynamic_bytes = shared_bytes;
  shared_limit_ = shared_bytes > kDefaultShared ? most_shared : kDefaultShared;  // launch() asked for more
  prepare(int(threads));
  shadow = nullptr;
  std::unique_ptr<TrafficMeter> meter_of_launch;
  random_ = 0x9e3779b97f4a7c15ull;
  if (session != nullptr) {
    shadow = session->shadow_.get();
    random_ = session->random_ = session->random_ * 6364136223846793005ull + 1442695040888963407ull;
    random_ |= 1;
    session->kernels_[name_] += 1;
    LaunchSize& size = session->launch_sizes_[name_];
    size = {std::max(size.threads, int(threads)), std::max(size.shared_bytes, shared_bytes), bound};
    shadow->begin_launch();
    if (session->record_traffic)
      meter_of_launch = std::make_unique<TrafficMeter>(session->traffic_[name_], shared_);
  }
  meter = meter_of_launch.get();
  std::vector<uint32_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = order.size(); session != nullptr && i > 1; --i)
    std::swap(order[i - 1], order[random() % i]);
  running_machine = this;
  bool well = true;
  for (const uint32_t number : order) {
    block_number_ = number;
    block_at = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    well = run_block();
    if (meter != nullptr) meter->flush();
    if (!well) break;
  }
  running_machine = before;
  if (well && shadow != nullptr) {
    report_ = shadow->end_launch();
    if (!report_.empty()) {
      report_ = name_ + ": " + report_;
      well = false;
    }
  }
  if (!well && session != nullptr) session->report_ = report_;
  if (well) return 0;
  return error_ != 0 ? error_ : 719;
}

bool Machine::run_block() {
  error_ = 0;
  num_done_ = num_waiting_ = 0;
  std::fill(std::begin(waiting_of_warp_), std::end(waiting_of_warp_), 0);
  statics_.clear();
  shared_end_ = size_t(dynamic_bytes);
  static_bytes_ = 0;
  if (shadow != nullptr) shadow->begin_block(size_t(dynamic_bytes));
  const int num_warps = (num_threads_ + kWarp - 1) / kWarp;
  for (int t = 0; t < num_threads_; ++t) {
    Fibre& fibre = *fibres_[size_t(t)];
    fibre.state = Fibre::State::kReady;
    fibre.at = {};
    fibre.index = {unsigned(t) % block.x, unsigned(t) / block.x % block.y, unsigned(t) / block.x / block.y};
    fibre.known = {};
    fibre.copies.clear();
  }
  const auto ready = [this](int t) {
    return t < num_threads_ && fibres_[size_t(t)]->state == Fibre::State::kReady;
  };
  while (num_done_ < num_threads_ && error_ == 0) {
    bool ran = false;
    const int first_warp = int(random() % unsigned(num_warps));
    for (int w = 0; w < num_warps && error_ == 0; ++w) {
      const int warp = (first_warp + w) % num_warps;
      const unsigned from = random(), by = random() | 1;
      for (unsigned i = 0; i < unsigned(kWarp) && error_ == 0; ++i) {
        const int thread = warp * kWarp + int((from + by * i) % unsigned(kWarp));
        if (!ready(thread)) continue;
        resume(thread);
        ran = true;
      }
      if (ran && random() % 4 == 0) break;  // another warp, perhaps this one again
    }
    if (ran || error_ != 0) continue;
    report_deadlock();
  }
  if (error_ != 0) {
    // An interrupted fibre never returns; its stack is reused from the start.
    for (int t = 0; t < num_threads_; ++t) {
      if (fibres_[size_t(t)]->state != Fibre::State::kDone) fibres_[size_t(t)]->begun = false;
    }
  }
  return error_ == 0;
}

void Machine::report_deadlock() {
  for (int t = 0; t < num_threads_; ++t) {
    Fibre& fibre = *fibres_[size_t(t)];
    if (fibre.state != Fibre::State::kWaiting) continue;
    running_ = t;
    const Waiting& at = fibre.at;
    for (int other = 0; other < num_threads_; ++other) {
      const Waiting& its = fibres_[size_t(other)]->at;
      const bool named = at.how == Meeting::kBlockBarrier ||
                         (other / kWarp == t / kWarp && (at.mask >> (other % kWarp) & 1) != 0);
      if (!named || (its.how == at.how && its.line == at.line && its.mask == at.mask && its.id == at.id))
        continue;
      return note("waits for ever at " + name_of(at.how, at.line) + " for " + name_of_thread(other) +
                      ", which is at " + name_of(its.how, its.line) +
                      "; look for a condition that not all of them share",
                  719);
    }
  }
  note("waits for ever", 719);
}

void Machine::exited(int thread) {
  Fibre& fibre = *fibres_[size_t(thread)];
  for (const auto& group : fibre.copies) {
    if (!group.empty() && shadow != nullptr)
      fail("ends with a cp.async under way; look for the wait_copies that is missing");
  }
  fibre.state = Fibre::State::kDone;
  fibre.at = {};
  ++num_done_;
  if (num_waiting_ == 0 && waiting_of_warp_[thread / kWarp] == 0) return;
  const auto names = [&](int other) {
    const Waiting& at = fibres_[size_t(other)]->at;
    if (at.how == Meeting::kNone) return false;
    if (at.how == Meeting::kBlockBarrier) return at.operand == 0;
    return other / kWarp == thread / kWarp && (at.mask >> (thread % kWarp) & 1) != 0;
  };
  for (int other = 0; other < num_threads_; ++other) {
    if (fibres_[size_t(other)]->state != Fibre::State::kWaiting || !names(other)) continue;
    const Waiting& at = fibres_[size_t(other)]->at;
    fibre.state = Fibre::State::kReady;  // its stack is not at its end
    fail("exits while " + name_of_thread(other) + " waits for it at " + name_of(at.how, at.line));
  }
}

void* Machine::static_memory(const void* key, size_t bytes, size_t alignment) {
  for (const Static& known : statics_) {
    if (known.key == key) return shared_ + known.at;
  }
  static_bytes_ = int64_t((size_t(static_bytes_) + alignment - 1) / alignment * alignment + bytes);
  // A gap keeps neighbours' bounds apart.
  const size_t at = (shared_end_ + 64 + alignment - 1) / alignment * alignment;
  if (dynamic_bytes + static_bytes_ > shared_limit_ || at + bytes > kSharedRoom) {
    fail("has " + std::to_string(static_bytes_) + " bytes of static shared memory beside " +
             std::to_string(dynamic_bytes) + " of dynamic: more than the " + std::to_string(shared_limit_) +
             " that the launch may have",
         1);
  }
  statics_.push_back({key, at, bytes});
  shared_end_ = at + bytes;
  if (shadow != nullptr) shadow->add_static(at, bytes);
  return shared_ + at;
}

}  // namespace simt
