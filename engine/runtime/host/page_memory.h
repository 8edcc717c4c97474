// Whole pages of host memory from the system: zeroed, and allocated at the first write (which decides their
// memory node).
#pragma once
#include <cstddef>
#include <utility>

namespace twofold {

inline constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

class PageMemory {
 public:
  PageMemory() = default;
  // `huge`: let the system back it by huge pages, fewer TLB misses while weights stream. Not for memory whose
  // parts belong to several nodes: a huge page lies on one. Throws std::bad_alloc.
  explicit PageMemory(size_t bytes, bool huge = true);
  ~PageMemory();
  PageMemory(PageMemory&& other) noexcept { swap(other); }
  PageMemory& operator=(PageMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(PageMemory& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace twofold
