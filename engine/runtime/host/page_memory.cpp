#include "host/page_memory.h"

#include <sys/mman.h>

#include <new>

namespace twofold {

PageMemory::PageMemory(size_t bytes, bool huge) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // A refusal costs nothing but speed.
  (void)madvise(memory, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  data_ = static_cast<std::byte*>(memory);
}

PageMemory::~PageMemory() {
  if (data_ != nullptr) (void)munmap(data_, bytes_);
}

}  // namespace twofold
