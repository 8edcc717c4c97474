// Files that this process has mapped: what is done when one of them changes while it is in use.
//
// A mapping shows every later change of its file. Where the file has become shorter, or its disk fails, the first
// access raises SIGBUS, which ends the process. Here the handler of SIGBUS puts zeros in place of the lost bytes,
// so that the thread goes on, and `change_of_file` reports it: what was computed since is to be thrown away.
#pragma once
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace twofold {

// Watches a mapping of `bytes` bytes at `data` of the file at `path`, whose state was `status` when it was mapped.
// Returns a number for `unwatch_file`; -1 where too many are watched. The first call handles SIGBUS from then on.
int watch_file(const std::byte* data, size_t bytes, const std::string& path, const struct stat& status);
void unwatch_file(int number);
// Where bytes [data, data + bytes) are in a watched mapping: its number and the offset in its file; number -1: in none.
struct WatchedPlace {
  int number = -1;
  int64_t offset = 0;
};
WatchedPlace watched_place(const std::byte* data, size_t bytes);
// A new descriptor of the file, for reading; -1 where it cannot be opened, or another one has its name now.
int open_watched(int number);
// The file's present state is the expected one from now on.
void accept_file(int number);

// What has happened to a watched file that was written to, made shorter or could not be read, in words; empty while
// it is as it was mapped. A file that was replaced or deleted does not count: its mapping keeps the old one. Asks
// the system, which takes 1 us.
std::string change_of_file(int number);

}  // namespace twofold
