#include "faults.h"
#include "machine.cuh"

using namespace twofold::cuda;

namespace faults {

namespace {

// KERNEL(name, blocks, threads, shared bytes, what the report says) { body using m and innocent }
#define KERNEL(name, blocks, threads, shared, says)                              \
  __global__ void name##_kernel(Memory m, bool innocent);                        \
  int name(const Memory& m, bool innocent) {                                     \
    return launch(name##_kernel, blocks, threads, shared, nullptr, m, innocent); \
  }                                                                              \
  constexpr const char* name##_says = says;                                      \
  __global__ void name##_kernel([[maybe_unused]] Memory m, [[maybe_unused]] bool innocent)

constexpr uint32_t kAll = 0xffffffffu;

KERNEL(read_past_the_end, 1, 32, 0, "behind the end of words") {
  m.blank[threadIdx.x] = m.words[256 - 32 + int(threadIdx.x) + (innocent ? 0 : 1)];
}
KERNEL(write_before_the_start, 1, 32, 0, "out of bounds") {
  m.words[int(threadIdx.x) - (innocent ? 0 : 1)] = 1;
}
KERNEL(read_across_the_end, 1, 1, 0, "is out of bounds: it has 1024") {
  m.blank[0] = uint32_t(*reinterpret_cast<const uint64_t*>(m.words + (innocent ? 254 : 255)));
}
KERNEL(shared_past_the_end, 1, 64, 64 * 4, "dynamic shared memory +256 is out of bounds") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  shared[threadIdx.x + (innocent ? 0 : 1)] = 1;
}
struct Two {
  uint32_t a[2];
};
KERNEL(static_past_the_end, 1, 1, 0, "static shared memory +8 is out of bounds") {
  Two& two = static_shared<Two>();
  volatile int at = innocent ? 1 : 2;
  two.a[at] = 1;
}
KERNEL(no_shared_memory_requested, 1, 1, 0, "did not ask for") {
  if (!innocent) dynamic_shared<uint32_t>()[0] = 1;
}

// What a device does not begin.
__global__ void __launch_bounds__(64, 2) more_threads_than_the_bounds_kernel(Memory m, bool innocent);
KERNEL(more_threads_than_the_bounds, 1, innocent ? 64 : 65, 0, "65 threads are more than the 64") {
  m.words[threadIdx.x] = 1;
}
KERNEL(more_shared_than_the_device_has, 1, 1, 99 * 1024 + (innocent ? 0 : 16), "that no device takes") {
  *dynamic_shared<uint32_t>() = 1;
}
KERNEL(static_beside_dynamic, 1, 1, 48 * 1024 - (innocent ? 8 : 0), "8 bytes of static shared memory") {
  static_shared<Two>().a[0] = 1;
}
KERNEL(static_next_to_requested, 1, 1, 99 * 1024 - (innocent ? 8 : 4), "more than the 101376 ") {
  static_shared<Two>().a[0] = 1;
}

KERNEL(freed_memory, 1, 1, 0, "has been freed") { m.words[0] = *(innocent ? m.words + 1 : m.elsewhere); }
KERNEL(misaligned, 1, 1, 0, "is misaligned") {
  const auto* bytes = reinterpret_cast<const uint8_t*>(m.words) + (innocent ? 4 : 2);
  m.blank[0] = *reinterpret_cast<const uint32_t*>(bytes);
}
KERNEL(misaligned_16, 1, 1, 0, "of 16 bytes at words +4 is misaligned") {
  const uint4 v = *reinterpret_cast<const uint4*>(m.words + (innocent ? 4 : 1));
  m.blank[0] = v.x;
}
KERNEL(not_initialised, 1, 32, 0, "is not initialised") {
  if (innocent) m.blank[64 + threadIdx.x] = 1;
  m.blank[threadIdx.x] = m.blank[64 + threadIdx.x];
}
KERNEL(shared_not_initialised, 2, 32, 128, "dynamic shared memory +") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  if (innocent || blockIdx.x == 0) shared[threadIdx.x] = 1;  // another block's shared memory is another
  m.blank[blockIdx.x * 32 + threadIdx.x] = shared[threadIdx.x];
}
KERNEL(half_initialised, 1, 1, 0, "is not initialised") {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(m.blank);
  for (int i = 0; i < (innocent ? 4 : 3); ++i) bytes[i] = 1;
  m.words[0] = m.blank[0];
}
KERNEL(read_races_write, 1, 64, 64 * 4, "race: |is not initialised") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  shared[threadIdx.x] = threadIdx.x;
  if (innocent) __syncthreads();
  m.words[threadIdx.x] = shared[63 - threadIdx.x];
  if (!innocent) __syncthreads();
}
KERNEL(write_races_read_of_before, 1, 64, 64 * 4, "race: ") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  m.words[threadIdx.x] = shared[63 - threadIdx.x];
  if (innocent) __syncthreads();
  shared[threadIdx.x] = 0;
}
KERNEL(writes_race, 1, 64, 0, "race: write") {
  if (innocent ? threadIdx.x == 0 : threadIdx.x % 32 == 0) m.words[0] = threadIdx.x;
}
KERNEL(bytes_of_a_word_race, 1, 64, 0, "race: write") {
  reinterpret_cast<uint8_t*>(m.words)[innocent ? threadIdx.x : threadIdx.x / 2] = 1;
}
KERNEL(blocks_race, 2, 1, 0, "blocks of a launch have no order") { m.words[innocent ? blockIdx.x : 0] = 1; }
KERNEL(block_reads_what_another_writes, 2, 1, 0, "blocks of a launch have no order") {
  if (blockIdx.x == 0)
    m.words[0] = 1;
  else
    m.blank[0] = m.words[innocent ? 1 : 0];
}
KERNEL(atomics_of_a_block_between_blocks, 4, 32, 0, "blocks of a launch have no order") {
  if (innocent)
    atomicAdd(m.words, 1u);
  else
    atomicAdd_block(m.words, 1u);
}
KERNEL(plain_beside_atomic, 1, 64, 0, "race: ") {
  atomicAdd(m.words, 1u);
  if (innocent) __syncthreads();
  if (threadIdx.x == 0) m.words[1] = m.words[0];
}
// The last of the blocks adds up what all have left.
KERNEL(last_block_without_a_fence, 4, 32, 4, "blocks of a launch have no order") {
  uint32_t* last = dynamic_shared<uint32_t>();
  m.blank[32 * blockIdx.x + threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (innocent) __threadfence();
    *last = atomicAdd(m.words, 1u);
    if (innocent) __threadfence();
  }
  __syncthreads();
  if (*last != 3 || threadIdx.x != 0) return;
  uint32_t sum = 0;
  for (int i = 0; i < 128; ++i) sum += m.blank[i];
  m.words[1] = sum;
}
KERNEL(lanes_race_after_a_shuffle, 1, 32, 128, "race: |is not initialised") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  shared[threadIdx.x] = threadIdx.x;
  const uint32_t other = __shfl_xor_sync(kAll, threadIdx.x, 1);
  if (innocent) __syncwarp();
  m.words[threadIdx.x] = shared[other];
}
KERNEL(syncwarp_of_half_a_warp, 1, 32, 128, "race: |is not initialised") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  shared[threadIdx.x] = threadIdx.x;
  __syncwarp(innocent ? kAll : threadIdx.x < 16 ? 0xffffu : 0xffff0000u);
  m.words[threadIdx.x] = shared[31 - threadIdx.x];
}
KERNEL(barrier_without_some, 1, 64, 0, "has exited|exits while") {
  if (!innocent && threadIdx.x >= 40) return;
  __syncthreads();
}
KERNEL(exit_while_others_wait, 1, 64, 0, "has exited|exits while") {
  if (innocent || threadIdx.x != 5) __syncthreads();
}
KERNEL(different_barriers, 1, 64, 0, "different barriers") {
  if (innocent || threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
KERNEL(barrier_and_shuffle, 1, 64, 0, "waits for ever at") {
  uint32_t value = threadIdx.x;
  if (innocent || threadIdx.x != 7) __syncthreads();
  value = __shfl_sync(kAll, value, 0);
  if (!innocent && threadIdx.x == 7) __syncthreads();
  m.words[threadIdx.x] = value;
}
KERNEL(shuffle_with_the_exited, 1, 32, 0, "which has exited|exits while") {
  if (!innocent && threadIdx.x == 9) return;
  m.words[threadIdx.x] = __shfl_down_sync(kAll, threadIdx.x, 1);
}
KERNEL(shuffle_beyond_the_mask, 1, 32, 0, "undefined") {
  if (threadIdx.x < 16) m.words[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, innocent ? 15 : 16);
}
KERNEL(mask_without_itself, 1, 32, 0, "does not name its own lane") {
  m.words[threadIdx.x] = __ballot_sync(innocent ? kAll : 0xffffu, 1);
}
KERNEL(vote_of_some, 1, 32, 0, "waits for ever") {
  if (innocent || threadIdx.x < 16)
    m.words[threadIdx.x] = __ballot_sync(kAll, 1);
  else
    __syncwarp();
}
KERNEL(syncwarp_in_half_a_warp, 1, 32, 0, "which has exited|exits while") {
  if (innocent || threadIdx.x < 16) __syncwarp();
}

// Copies.
KERNEL(copy_used_before_its_wait, 1, 32, 512, "in flight") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  copy_16(shared + 4 * threadIdx.x, m.words + 4 * threadIdx.x, true);
  close_copies();
  if (innocent) wait_copies<0>();
  m.blank[threadIdx.x] = shared[4 * threadIdx.x];
  wait_copies<0>();
}
KERNEL(copy_used_before_the_barrier, 1, 32, 512, "race: |in flight|is not initialised") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  copy_16(shared + 4 * threadIdx.x, m.words + 4 * threadIdx.x, true);
  close_copies();
  wait_copies<0>();
  if (innocent) __syncthreads();
  m.blank[threadIdx.x] = shared[4 * (31 - threadIdx.x)];
  if (!innocent) __syncthreads();
}
KERNEL(wait_for_one_group_too_few, 1, 1, 512, "in flight") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  copy_16(shared, m.words, true);
  close_copies();
  copy_16(shared + 4, m.words + 4, true);
  close_copies();
  wait_copies<1>();
  m.blank[0] = shared[innocent ? 0 : 4];
  wait_copies<0>();
}
KERNEL(copy_target_overwritten, 1, 1, 512, "in flight") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  copy_16(shared, m.words, true);
  close_copies();
  shared[innocent ? 4 : 0] = 1;
  wait_copies<0>();
}
KERNEL(copy_source_overwritten, 1, 1, 512, "source of a cp.async") {
  copy_16(dynamic_shared<uint32_t>(), m.words, true);
  close_copies();
  m.words[innocent ? 4 : 0] = 1;
  wait_copies<0>();
}
KERNEL(copy_never_waited_for, 1, 1, 512, "ends with a cp.async under way") {
  copy_16(dynamic_shared<uint32_t>(), m.words, true);
  close_copies();
  if (innocent) wait_copies<0>();
}
KERNEL(copy_over_what_is_read, 1, 32, 512, "race: |in flight") {
  uint32_t* shared = dynamic_shared<uint32_t>();
  for (int i = 0; i < 4; ++i) shared[4 * threadIdx.x + i] = 1;
  __syncthreads();
  m.blank[threadIdx.x] = shared[4 * (31 - threadIdx.x)];
  if (innocent) __syncthreads();
  copy_16(shared + 4 * threadIdx.x, m.words + 4 * threadIdx.x, true);
  close_copies();
  wait_copies<0>();
}

// What is shared with the host.
KERNEL(post_without_a_barrier, 1, 64, 0, "is not ordered before it") {
  m.mapped[1 + threadIdx.x] = threadIdx.x;
  if (innocent) __syncthreads();
  if (threadIdx.x == 0) store_release(m.mapped, 1);
}
KERNEL(post_by_a_plain_store, 1, 1, 0, "use store_release or load_acquire") {
  while (load_acquire(m.mapped + 8) == 7) {
  }
  if (innocent)
    store_release(m.mapped + 8, 1);
  else
    m.mapped[8] = 1;
}
KERNEL(plain_store_of_a_word_that_hands_over, 1, 1, 0, "use store_release or load_acquire") {
  if (innocent)
    store_release(m.mapped + 200, 1);
  else
    m.mapped[200] = 1;
}
KERNEL(plain_load_of_a_word_that_hands_over, 1, 1, 0, "use store_release or load_acquire") {
  m.words[0] = innocent ? load_acquire(m.mapped + 200) : m.mapped[200];
}
KERNEL(acquire_of_what_was_stored_plainly, 1, 1, 0, "use store_release or load_acquire") {
  if (innocent)
    store_release(m.mapped, 1);
  else
    m.mapped[0] = 1;
  m.words[0] = load_acquire(m.mapped);
}
KERNEL(writes_after_the_post, 1, 1, 0, "after its last release") {
  m.mapped[1] = 1;
  store_release(m.mapped, 1);
  if (innocent) return;
  m.mapped[2] = 1;
}
KERNEL(answer_read_without_an_acquire, 1, 1, 0, "without an acquire since the last release") {
  store_release(m.mapped, 1);
  if (innocent) load_acquire(m.mapped + 8);
  m.words[0] = m.answer[3];
}

__global__ void strided_kernel(Memory m, int stride) {
  uint32_t* shared = dynamic_shared<uint32_t>();
  for (int i = threadIdx.x; i < 32 * stride; i += 32) shared[i] = 1;
  __syncthreads();
  m.words[threadIdx.x] = shared[threadIdx.x * stride];
}

}  // namespace

int strided(const Memory& m, int stride) {
  return launch(strided_kernel, 1, 32, 128 * stride, nullptr, m, stride);
}

const Fault* all(size_t& count) {
#define FAULT(name) {#name, &name, name##_says}
#define REFUSED(name) {#name, &name, name##_says, 1}
  static const Fault faults[] = {
      FAULT(read_past_the_end),
      FAULT(write_before_the_start),
      FAULT(read_across_the_end),
      FAULT(shared_past_the_end),
      FAULT(static_past_the_end),
      FAULT(no_shared_memory_requested),
      REFUSED(more_threads_than_the_bounds),
      REFUSED(more_shared_than_the_device_has),
      REFUSED(static_beside_dynamic),
      REFUSED(static_next_to_requested),
      FAULT(freed_memory),
      FAULT(misaligned),
      FAULT(misaligned_16),
      FAULT(not_initialised),
      FAULT(shared_not_initialised),
      FAULT(half_initialised),
      FAULT(read_races_write),
      FAULT(write_races_read_of_before),
      FAULT(writes_race),
      FAULT(bytes_of_a_word_race),
      FAULT(blocks_race),
      FAULT(block_reads_what_another_writes),
      FAULT(atomics_of_a_block_between_blocks),
      FAULT(plain_beside_atomic),
      FAULT(last_block_without_a_fence),
      FAULT(lanes_race_after_a_shuffle),
      FAULT(syncwarp_of_half_a_warp),
      FAULT(barrier_without_some),
      FAULT(exit_while_others_wait),
      FAULT(different_barriers),
      FAULT(barrier_and_shuffle),
      FAULT(shuffle_with_the_exited),
      FAULT(shuffle_beyond_the_mask),
      FAULT(mask_without_itself),
      FAULT(vote_of_some),
      FAULT(syncwarp_in_half_a_warp),
      FAULT(copy_used_before_its_wait),
      FAULT(copy_used_before_the_barrier),
      FAULT(wait_for_one_group_too_few),
      FAULT(copy_target_overwritten),
      FAULT(copy_source_overwritten),
      FAULT(copy_never_waited_for),
      FAULT(copy_over_what_is_read),
      FAULT(post_without_a_barrier),
      FAULT(post_by_a_plain_store),
      FAULT(plain_store_of_a_word_that_hands_over),
      FAULT(plain_load_of_a_word_that_hands_over),
      FAULT(acquire_of_what_was_stored_plainly),
      FAULT(writes_after_the_post),
      FAULT(answer_read_without_an_acquire),
  };
  count = sizeof faults / sizeof faults[0];
  return faults;
}

}  // namespace faults
