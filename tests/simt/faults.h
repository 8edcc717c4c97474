// Small kernels that commit one fault each, or, being their innocent twins, do not.
#pragma once
#include <cstddef>
#include <cstdint>

namespace faults {

// What kernels touch: device words, words mapped to the host, a host-written answer among them.
struct Memory {
  uint32_t* words;      // [256], initialised
  uint32_t* blank;      // [256], not initialised
  uint32_t* mapped;     // [256]
  uint32_t* answer;     // [64] of mapped, which the host writes
  uint32_t* elsewhere;  // freed
};

struct Fault {
  const char* name;
  int (*run)(const Memory& memory, bool innocent);
  const char* report;  // a part of it; by the schedule one or another of several, with | between
  int error = 719;
};

const Fault* all(size_t& count);

// One warp reads shared memory, lane i at word i * stride, and writes 32 words.
int strided(const Memory& memory, int stride);

}  // namespace faults
