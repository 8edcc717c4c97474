// Which threads a pool has, on which cores and memory nodes: read from the system, limited to what the process
// may use.
#pragma once
#include <string>
#include <vector>

namespace twofold {

struct PoolThread {
  int core;                // the physical core intended for it; -1: none
  int node;                // index of its memory node within the pool, from 0
  std::vector<int> bound;  // the logical CPUs it is bound to; empty: not bound
};

struct PoolPlan {
  std::vector<PoolThread> threads;  // the first is the caller
  int num_nodes = 1;
  std::string reason;  // in words, for logs
};

inline constexpr int kMaxPoolThreads = 1024;

// `num_threads` counts the caller; 0 means one per physical core that this process may use on the nodes
// chosen (affinity, cgroup quota). `numa`: "off" binds nothing and knows one node; "auto" takes every node
// that has usable cores; "0,2" takes these nodes. With auto or nodes, a pool that fills its cores has a core
// for every thread; a smaller one is bound to nodes where there are several, else not at all (two small pools
// would share the first cores). `root` is put before /sys and /proc, for tests. Throws
// std::invalid_argument for a number of threads outside 0...kMaxPoolThreads and for a node that does not exist
// or has no usable core.
PoolPlan plan_pool(int num_threads, const std::string& numa, const std::string& root = "");

// The logical CPUs this process may use, one per physical core, cut to the CPU quota of its
// cgroups, rounded down (at least one).
std::vector<int> usable_cores(const std::string& root = "");

}  // namespace twofold
