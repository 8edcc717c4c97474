#include "expert_store.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace twofold {

std::byte* allocate_pages(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // Fewer TLB misses while weights stream; a refusal costs nothing but speed.
  (void)madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

void free_pages(std::byte* memory, size_t bytes) { (void)munmap(memory, bytes); }

void ExpertStore::Free::operator()(std::byte* p) const { free_pages(p, bytes); }

ExpertStore::ExpertStore(int num_layers, int num_experts, ExpertShape shape)
    : num_layers_(num_layers), num_experts_(num_experts), shape_(shape) {
  if (num_layers < 1 || num_experts < 1 || shape.hidden < 1 || shape.intermediate < 1) {
    throw std::invalid_argument(
        "an expert store needs at least one layer, expert, hidden and intermediate unit; given " +
        std::to_string(num_layers) + ", " + std::to_string(num_experts) + ", " +
        std::to_string(shape.hidden) + ", " + std::to_string(shape.intermediate));
  }
  const size_t total = size_t(num_layers) * size_t(num_experts) * stride();
  memory_ = std::unique_ptr<std::byte[], Free>(allocate_pages(total), Free{total});
}

size_t ExpertStore::stride() const { return (shape_.bytes() + 63) / 64 * 64; }

void ExpertStore::put(int layer, int expert, const void* gate, const void* up, const void* down) {
  std::byte* base = memory_.get() + (size_t(layer) * size_t(num_experts_) + size_t(expert)) * stride();
  const size_t matrix = shape_.matrix_bytes();
  std::memcpy(base, gate, matrix);
  std::memcpy(base + matrix, up, matrix);
  std::memcpy(base + 2 * matrix, down, matrix);
}

const std::byte* ExpertStore::expert(int layer, int expert) const {
  return memory_.get() + (size_t(layer) * size_t(num_experts_) + size_t(expert)) * stride();
}

}  // namespace twofold
