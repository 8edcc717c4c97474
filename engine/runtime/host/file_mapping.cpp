#include "host/file_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "host/page_memory.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace twofold {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kLookedAtBytes = size_t{1} << 30;  // by one call of mincore: a vector of 256 KiB

[[noreturn]] void fail(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

FileMapping::FileMapping(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // does not wait for a pipe
  if (file < 0) fail(path);
  struct stat status;
  void* memory = MAP_FAILED;
  int error = 0;
  if (fstat(file, &status) != 0) {
    error = errno;
  } else if (!S_ISREG(status.st_mode) || status.st_size == 0) {
    error = EINVAL;
  } else {
    bytes_ = static_cast<size_t>(status.st_size);
    memory = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) error = errno;
  }
  (void)close(file);
  if (error != 0) fail(path, error);
  // Where the file system has large folios (ext4 since Linux 6.16, xfs), faults read 2 MiB at a time and map
  // them by one entry: two threads read random experts at 18.9 GB/s then, and at 12.4 GB/s by pages of 4 KiB.
  (void)madvise(memory, bytes_, MADV_HUGEPAGE);
  data_ = static_cast<const std::byte*>(memory);
  watched_ = watch_file(data_, bytes_, path, status);
}

FileMapping::~FileMapping() {
  unwatch_file(watched_);
  (void)munmap(const_cast<std::byte*>(data_), bytes_);
}

const std::byte* FileMapping::range(size_t offset, size_t bytes) const {
  if (offset % kCacheLine != 0 || offset > bytes_ || bytes > bytes_ - offset) {
    throw std::invalid_argument(std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                                " of a file of " + std::to_string(bytes_) +
                                "; expected a range within it that begins at a multiple of " +
                                std::to_string(kCacheLine));
  }
  return data_ + offset;
}

void FileMapping::populate(size_t offset, size_t bytes) const {
  if (bytes == 0) return;
  (void)range(offset, bytes);
  const size_t begin = offset / kPageBytes * kPageBytes;
  const size_t end = std::min(round_up(offset + bytes, kPageBytes), bytes_);
  auto* const at = const_cast<std::byte*>(data_ + begin);
  if (madvise(at, end - begin, MADV_POPULATE_READ) == 0) return;
  if (errno == EINVAL) {  // an older kernel: reads ahead; pages are mapped at first use
    if (madvise(at, end - begin, MADV_WILLNEED) == 0) return;
  }
  fail("reading a mapped file");
}

void FileMapping::release(size_t offset, size_t bytes) const {
  if (offset % kPageBytes != 0 || bytes == 0) return;
  (void)range(offset, bytes);
  (void)madvise(const_cast<std::byte*>(data_ + offset), bytes, MADV_DONTNEED);
}

size_t FileMapping::resident_bytes(size_t offset, size_t bytes) const {
  (void)range(offset, bytes);
  const size_t begin = offset / kPageBytes * kPageBytes, end = offset + bytes;
  std::vector<unsigned char> pages(std::min(kLookedAtBytes, round_up(end - begin, kPageBytes)) / kPageBytes);
  size_t resident = 0;
  for (size_t from = begin; from < end; from += kLookedAtBytes) {
    const size_t here = std::min(kLookedAtBytes, end - from);
    if (mincore(const_cast<std::byte*>(data_ + from), here, pages.data()) != 0) fail("mincore");
    const size_t count = round_up(here, kPageBytes) / kPageBytes;
    resident += kPageBytes *
                static_cast<size_t>(std::count_if(pages.begin(), pages.begin() + static_cast<long>(count),
                                                  [](unsigned char page) { return (page & 1) != 0; }));
  }
  return std::min(resident, bytes);
}

}  // namespace twofold
