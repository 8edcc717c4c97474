// What kernels call: the built-in names of include/cuda_runtime.h and include/machine.cuh end here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace simt {

struct Index {
  unsigned x, y, z;
};
// Constant while a thread lives.
[[gnu::const]] Index thread_index();
[[gnu::const]] Index block_index();
[[gnu::const]] Index block_size();
[[gnu::const]] Index grid_size();

// Where lanes of a warp meet. Shuffles, votes and products let them meet without ordering their memory.
enum class Meeting : uint8_t {
  kNone,
  kBlockBarrier,
  kWarpBarrier,
  kShuffleIndex,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kMultiply
};

void block_barrier(int id, int num_threads, int line);  // num_threads 0: all
void warp_barrier(uint32_t mask, int line);
// What the lane is given for `value` (of `bytes` bytes); operand: a lane, a distance or a mask.
uint64_t exchange(Meeting how, uint32_t mask, uint64_t value, int operand, int line);
// c += a x b, fragments of mma.m16n8k16 with bf16 and f32.
void multiply(const uint32_t* a, const uint32_t* b, float* c, int line);

void* dynamic_memory();
void* static_memory(const void* key, size_t bytes, size_t alignment);

enum class Scope : uint8_t { kBlock, kDevice, kSystem };
// Adds and returns what was there; bytes 4 or 8.
uint64_t atomic_add(void* address, uint64_t value, size_t bytes, Scope scope);
void fence(Scope scope);
void store_release(uint32_t* word, uint32_t value);
uint32_t load_acquire(const uint32_t* word);

void begin_copy(void* shared, const void* global, bool there);
void close_copies();
void wait_copies(int left);

// A load and a store of one instruction: from an address to another, `bytes` of them.
void move(void* to, const void* from, size_t bytes);

int64_t nanoseconds();

// A kernel with its arguments bound.
struct Kernel {
  const char* text;      // the call, beginning with its name
  const char* instance;  // __PRETTY_FUNCTION__ of the launcher
  const void* function;
  void (*call)(const void* arguments);
  const void* arguments;
  size_t argument_bytes;
};
// A cudaError_t: 0, 1 (a launch that a device refuses) or 719 (the kernel failed); Session::report says how.
int run(const Kernel& kernel, Index grid, Index block, int64_t shared_bytes);

}  // namespace simt
