#include "host/mapped_files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace twofold {
namespace {

constexpr int kMostFiles = 4096;

struct Watched {
  // The handler reads and writes these; `end` is 0 in a free entry.
  std::atomic<uintptr_t> begin{0}, end{0};
  std::atomic<bool> is_lost{false};
  // Guarded by `mutex`.
  std::string path;
  struct stat status{};
};

// Process-wide, as a signal's handler is.
std::array<Watched, kMostFiles> files;
std::atomic<int> num_entries{0};
std::mutex mutex;
struct sigaction previous;

// Calls only what a handler may: mmap is a plain system call.
void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (int i = 0; i < num_entries.load(std::memory_order_acquire); ++i) {
    Watched& file = files[static_cast<size_t>(i)];
    const uintptr_t end = file.end.load(std::memory_order_acquire);
    if (address < file.begin.load(std::memory_order_relaxed) || address >= end) continue;
    file.is_lost.store(true, std::memory_order_release);
    const uintptr_t page = address & ~static_cast<uintptr_t>(sysconf(_SC_PAGESIZE) - 1);
    if (mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS,
             -1, 0) != MAP_FAILED) {
      return;
    }
  }
  constexpr char kLine[] =
      "twofold: SIGBUS: a mapped file has become shorter or its disk failed; check the disk and start "
      "again\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kLine, sizeof kLine - 1);
  (void)sigaction(signal, &previous,
                  nullptr);  // the access repeats, and the previous handler gets its signal
}

void handle_bus_errors() {
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  (void)sigaction(SIGBUS, &action, &previous);
}

bool same(const struct timespec& a, const struct timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

std::string change_of(const Watched& file) {
  if (file.is_lost.load(std::memory_order_acquire)) {
    return file.path + " has become shorter or its disk failed";
  }
  struct stat now{};
  if (stat(file.path.c_str(), &now) != 0 || now.st_ino != file.status.st_ino ||
      now.st_dev != file.status.st_dev) {
    return "";  // another file or none has its name
  }
  if (now.st_size != file.status.st_size) {
    return file.path + " has " + std::to_string(now.st_size) + " bytes now and had " +
           std::to_string(file.status.st_size);
  }
  return same(now.st_mtim, file.status.st_mtim) ? "" : file.path + " was written to";
}

}  // namespace

int watch_file(const std::byte* data, size_t bytes, const std::string& path, const struct stat& status) {
  static std::once_flag once;
  std::call_once(once, handle_bus_errors);
  const std::lock_guard lock(mutex);
  for (int i = 0; i < kMostFiles; ++i) {
    Watched& file = files[static_cast<size_t>(i)];
    if (file.end.load(std::memory_order_relaxed) != 0) continue;
    file.path = path;
    file.status = status;
    file.is_lost.store(false, std::memory_order_relaxed);
    file.begin.store(reinterpret_cast<uintptr_t>(data), std::memory_order_relaxed);
    file.end.store(reinterpret_cast<uintptr_t>(data) + bytes, std::memory_order_release);
    if (i >= num_entries.load(std::memory_order_relaxed)) num_entries.store(i + 1, std::memory_order_release);
    return i;
  }
  return -1;
}

void unwatch_file(int number) {
  if (number < 0) return;
  const std::lock_guard lock(mutex);
  files[static_cast<size_t>(number)].end.store(0, std::memory_order_release);
}

WatchedPlace watched_place(const std::byte* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const std::lock_guard lock(mutex);
  for (int i = 0; i < num_entries.load(std::memory_order_relaxed); ++i) {
    const Watched& file = files[static_cast<size_t>(i)];
    const uintptr_t from = file.begin.load(std::memory_order_relaxed);
    if (begin >= from && begin + bytes <= file.end.load(std::memory_order_relaxed))
      return {i, static_cast<int64_t>(begin - from)};
  }
  return {};
}

int open_watched(int number) {
  const std::lock_guard lock(mutex);
  const Watched& file = files[static_cast<size_t>(number)];
  const int descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat now{};
  if (descriptor >= 0 && fstat(descriptor, &now) == 0 && now.st_ino == file.status.st_ino &&
      now.st_dev == file.status.st_dev) {
    return descriptor;
  }
  if (descriptor >= 0) (void)close(descriptor);
  return -1;
}

void accept_file(int number) {
  if (number < 0) return;
  const std::lock_guard lock(mutex);
  Watched& file = files[static_cast<size_t>(number)];
  (void)stat(file.path.c_str(), &file.status);
}

std::string change_of_file(int number) {
  if (number < 0) return "";
  const std::lock_guard lock(mutex);
  return change_of(files[static_cast<size_t>(number)]);
}

}  // namespace twofold
