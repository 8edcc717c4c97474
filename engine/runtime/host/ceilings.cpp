#include "host/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "host/page_memory.h"
#include "twofold/kernels.h"
#include "twofold/peaks.h"

namespace twofold {
namespace {
constexpr int kRounds = 7;
constexpr int kChunksPerThread = 8;  // small enough that a preempted thread costs little

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
}  // namespace

double read_bytes_per_s(ThreadPool& pool, const std::string& level, int64_t num_bytes) {
  const kernels::KernelTable& table = *kernels::table_for_level(level.c_str());
  const int nodes = pool.num_nodes();
  // Chunks of whole huge pages where there are many; the same threads' nodes write and read them.
  const int64_t per_node = (int64_t{kChunksPerThread} * pool.num_threads() + nodes - 1) / nodes;
  const std::vector<int64_t> chunks_of_node(static_cast<size_t>(nodes), per_node);
  const LoopPhase phase{per_node * nodes, chunks_of_node.data()};
  const int64_t chunk_bytes =
      static_cast<int64_t>(round_up(static_cast<size_t>(num_bytes / phase.num_chunks + 1), 4096));
  const PageMemory memory(static_cast<size_t>(phase.num_chunks * chunk_bytes), nodes == 1);
  const auto for_all = [&](const auto& body) {
    pool.parallel_phases({&phase, 1},
                         [&](int, int64_t chunk, int) { body(memory.data() + chunk * chunk_bytes); });
  };
  for_all([&](std::byte* data) { std::memset(data, 1, static_cast<size_t>(chunk_bytes)); });
  std::atomic<uint64_t> all{0};  // so that the reads cannot be left out
  double fastest = 1e9;
  for (int turn = 0; turn < kRounds; ++turn) {
    fastest = std::min(fastest, seconds_of([&] {
                         for_all([&](const std::byte* data) {
                           all.fetch_add(table.read_all(data, chunk_bytes), std::memory_order_relaxed);
                         });
                       }));
  }
  return static_cast<double>(phase.num_chunks * chunk_bytes) / fastest;
}

std::vector<ProductRate> products_per_s(ThreadPool& pool, const std::string& level, double round_seconds) {
  std::vector<ProductRate> rates;
  for (const char* kind : kernels::kProductKinds) {
    const auto run = [&](int64_t rounds) { return kernels::peak_operations(level.c_str(), kind, rounds); };
    if (run(1) == 0) continue;
    // Rounds per chunk: doubled until the time is long enough for the clock.
    int64_t rounds = 1000;
    double took = seconds_of([&] { run(rounds); });
    while (took < 1e-3) took = seconds_of([&] { run(rounds *= 2); });
    rounds = std::max<int64_t>(
        1, static_cast<int64_t>(static_cast<double>(rounds) * round_seconds / took / kChunksPerThread));
    const int64_t num_chunks = int64_t{kChunksPerThread} * pool.num_threads();
    const int64_t operations = run(1) * rounds * num_chunks;
    double best = 0;
    for (int turn = 0; turn < kRounds; ++turn) {
      const double s = seconds_of([&] { pool.parallel_for(num_chunks, [&](int64_t, int) { run(rounds); }); });
      best = std::max(best, static_cast<double>(operations) / s);
    }
    rates.push_back({kind, best});
  }
  return rates;
}

double fork_join_s(ThreadPool& pool) {
  constexpr int kLoops = 2000;
  const int64_t chunks = pool.num_threads();
  double fastest = 1e9;
  for (int turn = 0; turn < kRounds; ++turn) {
    fastest = std::min(fastest, seconds_of([&] {
                         for (int loop = 0; loop < kLoops; ++loop)
                           pool.parallel_for(chunks, [](int64_t, int) {});
                       }));
  }
  return fastest / kLoops;
}

}  // namespace twofold
