#include "ops/dense_kv_cache.h"

#include <sys/mman.h>

#include <new>
#include <stdexcept>
#include <string>

namespace twofold {

KvCache::KvCache(int num_layers, int num_pages, int page_size, int num_kv_heads, int head_dim,
                 kernels::DType dtype)
    : num_layers_(num_layers),
      num_pages_(num_pages),
      page_size_(page_size),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      dtype_(dtype) {
  const struct {
    const char* name;
    int value;
  } sizes[] = {{"num_layers", num_layers},
               {"num_pages", num_pages},
               {"page_size", page_size},
               {"num_kv_heads", num_kv_heads},
               {"head_dim", head_dim}};
  int64_t elements = 2;
  for (const auto& [name, value] : sizes) {
    if (value < 1) {
      throw std::invalid_argument(std::string("KvCache: ") + name + " is " + std::to_string(value) +
                                  "; expected at least 1");
    }
    if (__builtin_mul_overflow(elements, static_cast<int64_t>(value), &elements) ||
        elements > (int64_t{1} << 46)) {
      throw std::invalid_argument(
          "KvCache: layers x pages x page_size x heads x head_dim is beyond 64 Ti elements; "
          "lower the number of pages");
    }
  }
  row_bytes_ = head_dim * kernels::element_bytes(dtype);
  values_offset_ = static_cast<int64_t>(num_kv_heads) * num_pages * page_size * row_bytes_;
  bytes_ = elements * kernels::element_bytes(dtype);
  void* memory = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(memory);
}

KvCache::~KvCache() { munmap(base_, static_cast<size_t>(bytes_)); }

}  // namespace twofold
