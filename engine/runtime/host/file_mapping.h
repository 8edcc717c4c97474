// A file mapped into memory, read-only: its pages are the system's and shared by every process that maps it.
// It is watched for changes (mapped_files.h) as long as it is mapped.
#pragma once
#include <cstddef>
#include <string>

#include "host/mapped_files.h"

namespace twofold {

class FileMapping {
 public:
  // Throws std::system_error where the file cannot be opened or mapped, is empty or no regular file.
  explicit FileMapping(const std::string& path);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  const std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // The range that begins at `offset`. Throws std::invalid_argument unless it lies within the file, on a cache
  // line.
  const std::byte* range(size_t offset, size_t bytes) const;

  // Reads pages [offset, offset + bytes) and enters them in this process's page table; returns when they are
  // there. Throws as range(); std::system_error if the file has become shorter or its disk fails.
  void populate(size_t offset, size_t bytes) const;
  // Removes whole pages of the range from this process's page table; a later access maps them again.
  void release(size_t offset, size_t bytes) const;
  // What has happened to the file since, in words; empty while it is as it was mapped (mapped_files.h).
  std::string change() const { return change_of_file(watched_); }
  // The file's present state is the expected one from now on: its time was set, not its contents.
  void accept() const { accept_file(watched_); }
  // Bytes of that range in the system's page cache, whichever process read them. Throws as range().
  size_t resident_bytes(size_t offset, size_t bytes) const;

 private:
  const std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int watched_ = -1;
};

}  // namespace twofold
