// The device's clock: nanoseconds since some moment, the same for all its kernels.
#pragma once
#include <cstdint>

namespace twofold::cuda {

__device__ inline int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace twofold::cuda
