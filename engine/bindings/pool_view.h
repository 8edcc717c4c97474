// Python's ThreadPool: threads, and the kernels of the operators created on it.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "host/thread_pool.h"
#include "twofold/kernels.h"

namespace twofold::bindings {

class PoolView {
 public:
  explicit PoolView(std::shared_ptr<ThreadPool> threads, const kernels::KernelTable* table = nullptr)
      : threads_(std::move(threads)), table_(table) {}

  // The same threads, with the kernels of one level. Throws ConfigFailure for one that cannot run here.
  PoolView at_level(const std::string& level) const;

  ThreadPool& threads() const { return *threads_; }
  operator ThreadPool&() const { return *threads_; }
  // The process's kernels, if no level was requested.
  const kernels::KernelTable& kernels() const;

 private:
  std::shared_ptr<ThreadPool> threads_;
  const kernels::KernelTable* table_;
};

}  // namespace twofold::bindings
