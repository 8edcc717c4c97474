// The clock of fake kernels: nanoseconds, the host's.
#pragma once
#include <chrono>
#include <cstdint>

namespace twofold::fake {

inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace twofold::fake
