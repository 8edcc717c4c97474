// What kernels call, the sanitizer's calls for every access included.
#include "kernel_side.h"

#include <sched.h>

#include <chrono>
#include <cstring>

#include "machine/machine.h"
#include "machine/shadow.h"

namespace simt {

namespace {

thread_local Session* watching = nullptr;

Machine& machine() { return *running_machine; }

[[gnu::always_inline]] inline void touched(const void* address, size_t bytes, bool write,
                                           const void* instruction) {
  Machine* m = running_machine;
  if (m == nullptr || m->shadow == nullptr || m->on_stack(address) || m->in_arguments(address)) return;
  m->shadow->access(*m, address, bytes, write);
  if (m->meter != nullptr)
    m->meter->note(m->thread(), instruction, address, int(bytes), m->in_shared(address), write);
}

}  // namespace

Index thread_index() { return machine().self().index; }
Index block_index() { return machine().block_at; }
Index block_size() { return machine().block; }
Index grid_size() { return machine().grid; }

void block_barrier(int id, int num_threads, int line) {
  machine().meet({.how = Meeting::kBlockBarrier, .line = line, .operand = num_threads, .id = id});
}
void warp_barrier(uint32_t mask, int line) {
  machine().meet({.how = Meeting::kWarpBarrier, .mask = mask, .line = line});
}
uint64_t exchange(Meeting how, uint32_t mask, uint64_t value, int operand, int line) {
  machine().meet({.how = how, .mask = mask, .line = line, .operand = operand, .value = value});
  return machine().self().at.value;
}
void multiply(const uint32_t* a, const uint32_t* b, float* c, int line) {
  machine().meet({.how = Meeting::kMultiply, .mask = 0xffffffffu, .line = line, .a = a, .b = b, .c = c});
}

void* dynamic_memory() { return machine().shared_; }
void* static_memory(const void* key, size_t bytes, size_t alignment) {
  return machine().static_memory(key, bytes, alignment);
}

uint64_t atomic_add(void* address, uint64_t value, size_t bytes, Scope scope) {
  Machine& m = machine();
  if (m.shadow != nullptr) m.shadow->atomic(m, address, bytes, scope);
  if (bytes == 4)
    return __atomic_fetch_add(static_cast<uint32_t*>(address), uint32_t(value), __ATOMIC_RELAXED);
  return __atomic_fetch_add(static_cast<uint64_t*>(address), value, __ATOMIC_RELAXED);
}
void fence(Scope) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  Machine& m = machine();
  if (m.shadow != nullptr) m.shadow->fence(m);
}
void store_release(uint32_t* word, uint32_t value) {
  Machine& m = machine();
  if (m.shadow != nullptr) m.shadow->release(m, word);
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
uint32_t load_acquire(const uint32_t* word) {
  Machine& m = machine();
  const uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  if (m.shadow != nullptr) m.shadow->acquired(m, word);
  sched_yield();  // the thread waited for has to run, too
  return value;
}

void begin_copy(void* shared, const void* global, bool there) {
  Machine& m = machine();
  if (m.meter != nullptr && there)
    m.meter->note(m.thread(), __builtin_return_address(0), global, 16, false, false);
  m.begin_copy(static_cast<uint8_t*>(shared), static_cast<const uint8_t*>(global), there);
}
void close_copies() { machine().close_copies(); }
void wait_copies(int left) { machine().wait_copies(left); }

void move(void* to, const void* from, size_t bytes) {
  touched(from, bytes, false, __builtin_return_address(0));
  touched(to, bytes, true, static_cast<const char*>(__builtin_return_address(0)) + 1);
  std::memcpy(to, from, bytes);
}

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Machine::begin_copy(uint8_t* shared, const uint8_t* global, bool there) {
  Copy copy{shared, global, there, {}};
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0)
    fail("cp.async of 16 bytes is misaligned");
  if (shadow != nullptr) shadow->begin_copy(*this, shared, global, there, copy.source_writes);
  auto& groups = self().copies;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(copy);
}

void Machine::close_copies() {
  if (self().copies.empty()) self().copies.emplace_back();
  self().copies.emplace_back();
}

void Machine::wait_copies(int left) {
  auto& groups = self().copies;  // the last is open
  while (int(groups.size()) > left + 1) {
    for (const Copy& copy : groups.front()) {
      if (shadow != nullptr) shadow->land_copy(*this, copy.to, copy.from, copy.there, copy.source_writes);
      if (copy.there)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
    }
    groups.pop_front();
  }
}

std::string name_of(Meeting how, int line) {
  static const char* const names[] = {"nothing",       "__syncthreads", "__syncwarp",
                                      "a shuffle",     "a shuffle up",  "a shuffle down",
                                      "a shuffle xor", "a vote",        "a matrix product"};
  if (how == Meeting::kNone) return "no meeting place";
  return std::string(names[size_t(how)]) + " of line " + std::to_string(line);
}

// "gate_up_kernel [with ... F = ...]": the call's first argument, and what the launcher is an instance of.
std::string name_of(const Kernel& kernel) {
  std::string name(kernel.text);
  name = name.substr(0, name.find_first_of("<,"));
  const std::string instance(kernel.instance);
  const size_t with = instance.find("[with ");
  return with == std::string::npos ? name : name + " " + instance.substr(with);
}

std::string Machine::name_of_thread(int thread) const {
  const Index& at = block_at;
  return "block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
         "), thread " + std::to_string(thread) + " (lane " + std::to_string(thread % kWarp) + " of warp " +
         std::to_string(thread / kWarp) + ")";
}

int run(const Kernel& kernel, Index grid, Index block, int64_t shared_bytes) {
  return Machine::of_this_thread().launch(kernel, grid, block, shared_bytes, watching);
}

Session::Session(uint64_t seed, Mode mode) : random_(seed), shadow_(std::make_unique<Shadow>(mode)) {}
Session::~Session() = default;
void Session::add(const std::string& name, const void* memory, size_t bytes, Memory kind) {
  shadow_->add(name, static_cast<const uint8_t*>(memory), bytes, kind);
}
bool Session::remove(const void* memory) {
  const std::string wrong = shadow_->remove(static_cast<const uint8_t*>(memory));
  if (!wrong.empty()) report_ = wrong;
  return wrong.empty();
}
void Session::written_by_host(const void* memory, size_t bytes) {
  shadow_->written_by_host(static_cast<const uint8_t*>(memory), bytes);
}
void Session::host_answers(const void* memory, size_t bytes) {
  shadow_->host_answers(static_cast<const uint8_t*>(memory), bytes);
}
void Session::hands_over(const void* word) { shadow_->hands_over(static_cast<const uint8_t*>(word)); }
void Session::acquired_by_stream(const void* mapped) {
  shadow_->acquired_by_stream(static_cast<const uint8_t*>(mapped));
}

Watched::Watched(Session* session) : before_(watching) { watching = session; }
Watched::~Watched() { watching = before_; }

const std::string& last_report() { return Machine::of_this_thread().report(); }

}  // namespace simt

// ---- what -fsanitize=thread lets kernels call --------------------------------------------------------------

#define SIMT_ACCESS(bytes)                                                                          \
  void __tsan_read##bytes(void* p) { simt::touched(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* p) { simt::touched(p, bytes, true, __builtin_return_address(0)); }
#define SIMT_UNALIGNED(bytes)                                    \
  void __tsan_unaligned_read##bytes(void* p) {                   \
    simt::touched(p, bytes, false, __builtin_return_address(0)); \
  }                                                              \
  void __tsan_unaligned_write##bytes(void* p) { simt::touched(p, bytes, true, __builtin_return_address(0)); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
SIMT_UNALIGNED(2)
SIMT_UNALIGNED(4)
SIMT_UNALIGNED(8)
SIMT_UNALIGNED(16)
// gcov's counters use these in coverage builds; kernels' own atomics are atomic_add's.
long __tsan_atomic64_fetch_add(volatile long* p, long by, int) {
  return __atomic_fetch_add(p, by, __ATOMIC_RELAXED);
}
void __tsan_read_range(void* p, unsigned long bytes) {
  for (unsigned long i = 0; i < bytes; ++i)
    simt::touched(static_cast<char*>(p) + i, 1, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
  for (unsigned long i = 0; i < bytes; ++i)
    simt::touched(static_cast<char*>(p) + i, 1, true, __builtin_return_address(0));
}
}
