// The clock of kernels that are played: nanoseconds, the host's.
#pragma once
#include <chrono>
#include <cstdint>

namespace twofold::played {

inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace twofold::played
