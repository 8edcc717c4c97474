// What is known of every byte that kernels may touch: written?, by whom last, read by whom since.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernel_side.h"
#include "machine/clocks.h"
#include "simt.h"

namespace simt {

class Machine;

enum class Touch : uint8_t { kPlain, kAtomic, kBlockAtomic, kSync };  // kSync: a release or an acquire

// A moment of a thread of a launch, or one of the marks below. launch 20 | block 18 | thread 10 | touch 2 | clock 14.
using Moment = uint64_t;
inline constexpr uint64_t kLaunchBits = 20, kBlockBits = 18, kThreadBits = 10, kTouchBits = 2,
                          kClockBits = 14;
inline constexpr Moment kNever = 0;     // as a writer: not initialised
inline constexpr Moment kByHost = 1;    // or by something that all threads have seen
inline constexpr Moment kSplit = 2;     // a word whose bytes have cells of their own
inline constexpr Moment kInFlight = 3;  // a copy goes there; + thread << 14

struct Cell {
  Moment write = kNever;
  Moment reads[2] = {0,
                     0};  // of different threads, different warps if there are such: a later writer that has
                          // seen both has, with barriers of blocks and warps, seen all
};

class Shadow {
 public:
  explicit Shadow(Mode mode) : mode_(mode) {}

  void begin_launch();
  std::string end_launch();  // what is wrong at its end, or ""
  void begin_block(size_t dynamic_bytes);
  void add_static(size_t at, size_t bytes);

  // By the running thread; ends the launch where it is a fault.
  void access(Machine& machine, const void* address, size_t bytes, bool write, Touch touch = Touch::kPlain);
  void begin_copy(Machine& machine, uint8_t* shared, const uint8_t* global, bool there, Moment (&writes)[4]);
  void land_copy(Machine& machine, uint8_t* shared, const uint8_t* global, bool there,
                 const Moment (&writes)[4]);
  void release(Machine& machine, uint32_t* word);
  void acquired(Machine& machine, const uint32_t* word);
  void fence(Machine& machine);
  void atomic(Machine& machine, void* address, size_t bytes, Scope scope);

  void add(const std::string& name, const uint8_t* memory, size_t bytes, Memory kind);
  std::string remove(const uint8_t* memory);  // what is wrong, or ""
  void written_by_host(const uint8_t* memory, size_t bytes);
  void host_answers(const uint8_t* memory, size_t bytes);
  void hands_over(const uint8_t* word);
  void acquired_by_stream(const uint8_t* mapped);

  std::mutex mutex;  // one launch at a time

 private:
  struct Region {
    std::string name;
    const uint8_t* base = nullptr;
    size_t bytes = 0;
    Memory kind = Memory::kInitialised;
    bool gone = false;
    std::vector<Cell> cells;  // of words
    // Mapped memory only.
    size_t answer_at = 0, answer_bytes = 0;
    bool answered = false;
    bool released = false;                 // in this launch
    std::vector<size_t> unreleased;        // words written since the last release of this launch
    std::vector<const void*> sync_words;   // this launch's
    std::vector<const void*> known_words;  // all launches'
  };
  struct Place {
    Region* region;
    size_t at;
  };
  Place find(Machine& machine, const void* address, size_t bytes, const char* doing);
  Region* region_of(const uint8_t* address);
  Cell& word(const Place& place, size_t number);
  void check(Machine& machine, Cell& cell, bool write, Touch touch, const Place& place, size_t bytes);
  void check_mapped(Machine& machine, Region& region, size_t at, size_t bytes, bool write, Touch touch);
  bool ordered(Machine& machine, Moment before, Touch touch) const;
  Moment now(Machine& machine, Touch touch) const;
  std::string described(Machine& machine, Moment moment) const;
  std::string at(const Place& place, size_t bytes) const;

  Mode mode_;
  uint64_t launch_ = 0;
  std::map<const uint8_t*, std::unique_ptr<Region>> regions_;  // by base
  Region* last_ = nullptr;
  std::vector<std::unique_ptr<Region>> shared_;                   // dynamic, then static
  std::unordered_map<uintptr_t, std::unique_ptr<Region>> pages_;  // of memory that is no region, in open mode
  std::vector<std::unique_ptr<Cell[]>> bytes_of_words_;
  std::unordered_map<const void*, Released> published_;
  std::unordered_map<int64_t, Released> fenced_, pending_;  // by block and thread: before, after a fence
};

}  // namespace simt
