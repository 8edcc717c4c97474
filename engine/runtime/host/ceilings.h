// Peak rates of this machine with the threads of a pool, the reference for every measurement's share.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "host/thread_pool.h"

namespace twofold {

struct ProductRate {
  const char* kind;  // one of kernels::kProductKinds
  double per_second;
};

// Bytes per second of a plain read of memory laid out as weights are, by the level's widest loads; the fastest
// of several runs. num_bytes must exceed the last-level cache. Throws std::bad_alloc.
double read_bytes_per_s(ThreadPool& pool, const std::string& level, int64_t num_bytes);

// Operations per second of products that stay in registers, for each kind that the level has: the fastest of
// several runs of about round_seconds.
std::vector<ProductRate> products_per_s(ThreadPool& pool, const std::string& level, double round_seconds);

// Seconds of an empty loop on threads that are awake.
double fork_join_s(ThreadPool& pool);

}  // namespace twofold
