// Which misses of a table step with several tokens the device reads from the host's memory itself. A read
// expert serves all pairs routed to it, takes the link for one read of its weights per kDecodeTokens tokens,
// and spares the CPU its work. Misses are read most tokens first, and as many as make the layer shortest by
// the cost model (engine/core/include/twofold/cost_model.h). No other choice is shorter as long as an expert
// takes link and device the same time whatever its tokens, which for a few is that of reading its weights.
// Figures come as whole nanoseconds: sums do not depend on the order of threads, and device and host choose
// alike. Plain C++.
#pragma once
#include <cstdint>

#include "launch_shapes.h"
#include "placement.h"

namespace twofold::cuda {

inline constexpr int kMostReadTokens = 32;  // in a step

// In device memory; all by the tokens of an expert, [0] unused.
struct ReadPrices {
  uint32_t reads;                           // 0: nothing is ever read
  uint32_t launch_ns, handshake_ns;         // once per layer that uses the device, or the CPU
  uint32_t gpu_ns[kMostReadTokens + 1];     // an expert on the device
  uint32_t link_ns[kMostReadTokens + 1];    // its weights over the link
  uint32_t cpu_ns[kMostReadTokens + 1];     // an expert on the CPU, with nothing on the link
  uint32_t slowed_ns[kMostReadTokens + 1];  // how much longer at most while the link copies
  uint32_t drag_ns[kMostReadTokens + 1];    // how much longer the CPU takes at most for one read
};
inline constexpr int kReadPriceWords = int(sizeof(ReadPrices) / sizeof(uint32_t));

// Counts and times of a layer's experts, before any expert is read.
struct ReadSums {
  uint32_t num_hits, num_misses;
  uint64_t hit_ns, cpu_ns, slowed_ns;
};

// Where miss e comes among the misses, by most tokens, then by number. counts[e] > 0.
TWOFOLD_HD int misses_before(const int32_t* counts, const uint8_t* place, int num_experts, int expert) {
  int before = 0;
  for (int e = 0; e < num_experts; ++e)
    before += place[e] == kCpu && (counts[e] > counts[expert] || (counts[e] == counts[expert] && e < expert));
  return before;
}

TWOFOLD_HD constexpr uint64_t larger_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

// How many of the misses, [sums.num_misses] in their order, are read; ties go to fewer.
TWOFOLD_HD int num_reads(const int32_t* misses, const int32_t* counts, ReadSums sums,
                         const ReadPrices& prices) {
  uint64_t gpu = sums.num_hits > 0 ? prices.launch_ns + sums.hit_ns : 0, link = 0, drag = 0;
  uint64_t best = larger_of(gpu, prices.handshake_ns + sums.cpu_ns);
  int reads = 0;
  if (sums.num_hits == 0) gpu = prices.launch_ns;
  for (uint32_t n = 1; n <= sums.num_misses; ++n) {
    const int tokens = counts[misses[n - 1]];
    link += prices.link_ns[tokens];
    drag += prices.drag_ns[tokens];
    sums.cpu_ns -= prices.cpu_ns[tokens];
    sums.slowed_ns -= prices.slowed_ns[tokens];
    gpu = larger_of(gpu, link) + prices.gpu_ns[tokens];
    if (gpu >= best) break;  // one more takes longer still
    const uint64_t slower = sums.slowed_ns < drag ? sums.slowed_ns : drag;
    const uint64_t cpu = n < sums.num_misses ? prices.handshake_ns + sums.cpu_ns + slower : 0;
    if (larger_of(gpu, cpu) >= best) continue;
    best = larger_of(gpu, cpu);
    reads = int(n);
  }
  return reads;
}

}  // namespace twofold::cuda
