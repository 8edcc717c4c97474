// Everything that only a GPU compiler understands: launching, a block's shared memory, instructions without an
// intrinsic. Kernels are otherwise plain C++ with CUDA's built-in names: a replacement for this header and for
// cuda_runtime.h runs them elsewhere.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "twofold/numbers.h"

namespace twofold::kernels {

TWOFOLD_HD float f16_instruction([[maybe_unused]] uint16_t half) {
  float value = 0;  // cuda_fp16.h's __half2float, without its 8,800 lines
#ifdef __CUDA_ARCH__
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
#endif
  return value;
}

}  // namespace twofold::kernels

namespace twofold::cuda {

inline constexpr int64_t kDefaultSharedBytes = 48 * 1024;  // more must be asked for

// Launches and returns cudaGetLastError().
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int64_t shared_bytes, cudaStream_t stream,
           const Arguments&... arguments) {
  if (shared_bytes > kDefaultSharedBytes) {
    const int error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != 0) return error;
  }
  kernel<<<grid, block, size_t(shared_bytes), stream>>>(arguments...);
  return cudaGetLastError();
}

// The shared memory that the launch gave the block, aligned to 16 bytes.
template <class T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_memory[];
  return reinterpret_cast<T*>(dynamic_memory);
}

// One T for the block, not initialised.
template <class T>
__device__ inline T& static_shared() {
  __shared__ T object;
  return object;
}

// Nanoseconds since some moment, the same for all kernels of a device.
__device__ inline int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Words that the host reads and writes while a kernel runs.
__device__ inline void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// 16 bytes from global to shared memory, without waiting; zeros where there is nothing to read. close_copies()
// groups the copies begun since the last one; wait_copies<n>() waits until only the thread's last n groups are running.
__device__ inline void copy_16(void* shared, const void* global, bool there) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// c += a x b by a whole warp: 16 x 16 times 16 x 8, bf16 with f32 sums. launch_shapes.h says what a lane holds.
__device__ inline void multiply_fragments(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace twofold::cuda
