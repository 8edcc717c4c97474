// Vector clocks of a block's threads: which writes each thread has seen.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace simt {

// Clocks of all threads of a block; shared by the threads that left one barrier.
using Clocks = std::shared_ptr<const std::vector<uint32_t>>;

// What one thread knows: its own clock, its block's threads' and, where atomics told it, other blocks'.
struct Known {
  uint32_t clock = 1;
  Clocks block;
  std::vector<std::pair<int64_t, Clocks>> others;

  bool has_seen(int thread, uint32_t when) const {
    return block != nullptr && (*block)[size_t(thread)] >= when;
  }
  bool has_seen_of(int64_t other, int thread, uint32_t when) const {
    for (const auto& [number, clocks] : others) {
      if (number == other && (*clocks)[size_t(thread)] >= when) return true;
    }
    return false;
  }
};

// What a release publishes.
using Released = std::vector<std::pair<int64_t, Clocks>>;

// Everything that thread `self` of block `number` knows, its own past included.
Released released_by(const Known& known, int64_t number, int self, int num_threads);
void acquire(Known& known, int64_t number, const Released& released);
// The later of both, per thread; null is earlier than everything.
Clocks later_of(const Clocks& a, const Clocks& b);

}  // namespace simt
