// Loops inside chunks. Here and not in Python: a module for tests holds a copy of the pool's code, whose threads
// do not know that they run a chunk of the other copy, so that a loop inside one would wait for itself.
#include "host/thread_pool.h"

#include <atomic>

#include "check.h"

CASE(a_loop_inside_a_chunk_runs_on_that_thread) {
  for (const int threads : {1, 3}) {
    twofold::ThreadPool pool(twofold::plan_pool(threads, "off"));
    std::atomic<int> inside{0}, elsewhere{0};
    for (int i = 0; i < 2000; ++i) {
      pool.parallel_for(9, [&](int64_t, int thread) {
        pool.parallel_for(5, [&](int64_t, int inner) { ++(inner == thread ? inside : elsewhere); });
      });
    }
    CHECK_EQUAL(inside.load(), 2000 * 9 * 5);
    CHECK_EQUAL(elsewhere.load(), 0);
  }
}

int main(int argc, char** argv) { return test::main(argc, argv); }
