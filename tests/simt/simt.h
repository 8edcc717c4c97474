// A machine that runs CUDA kernels on the CPU and is stricter than a card: what tests see of it.
//
// The kernels' own sources are compiled by the host compiler against include/ and with -fsanitize=thread, whose calls
// for every access of memory end in hooks.cpp. A block's threads are fibres that change hands where lanes of a warp or
// the block meet; warps, lanes and blocks take turns in a seeded random order. A Session watches: bounds, alignment,
// initialisation, races by vector clocks, barriers, lanes that are named and are not there, copies under way, the order
// of writes that the host reads. Without one, kernels just run. Either way a launch is refused as a device refuses it:
// more threads than the kernel's launch bounds, more shared memory, dynamic and static, than was asked for or exists.
// Static memory is counted once a thread has come to it; the launch bounds' second number (blocks of a multiprocessor)
// and registers are the compiler's business (make check-cuda).
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace simt {

// How memory that is no region counts: refused, or taken as initialised and looked at for races only.
enum class Mode : uint8_t { kStrict, kOpen };

enum class Memory : uint8_t {
  kInitialised,
  kUninitialised,
  kMapped  // shared with the host while kernels run: words are released and acquired
};

// Shared memory of a block, in bytes: what it has without asking for more, and the most it may ask for. That is 99 KiB
// on the least of the architectures that kernels are built for, 227 on 9.0.
inline constexpr int64_t kDefaultShared = 48 * 1024, kLeastMostShared = 99 * 1024, kMostShared = 227 * 1024;

// What one kind of access of a kernel did, over warps.
struct Traffic {
  int64_t requests = 0;  // per warp
  int64_t bytes = 0;
  int64_t passes = 0;  // shared memory: wavefronts; global memory: sectors of 32 bytes
  int64_t least = 0;   // what the same bytes need at least
};
struct TrafficKey {
  bool shared;
  bool write;
  int width;  // bytes of one lane
  auto operator<=>(const TrafficKey&) const = default;
};

// A kernel's launch as occupancy counts it: the largest of the session.
struct LaunchSize {
  int threads = 0;           // per block
  int64_t shared_bytes = 0;  // dynamic
  int bound = 0;             // threads that the kernel's launch bounds allow; 0: it declares none
};

class Shadow;

// Watches the launches of threads that `use` it; one launch at a time. A launch ends at its first fault: it returns 719
// (1 where a device would not begin it) and report() says what was found.
class Session {
 public:
  explicit Session(uint64_t seed, Mode mode = Mode::kStrict);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Memory that kernels may touch, with exact bounds.
  void add(const std::string& name, const void* memory, size_t bytes, Memory kind = Memory::kInitialised);
  // The memory is gone: touching or removing it again is a fault. False (and a report) where it was not there.
  bool remove(const void* memory);
  void written_by_host(const void* memory, size_t bytes);
  // Bytes of a mapped region that the host writes and kernels may read only after an acquire that follows the last
  // release.
  void host_answers(const void* memory, size_t bytes);
  // A word of a mapped region by which host and kernels hand over: plain accesses of it are faults in any launch.
  void hands_over(const void* word);
  void acquired_by_stream(const void* mapped);  // a stream waited in a kernel's place

  const std::string& report() const { return report_; }
  void clear_report() { report_.clear(); }
  // Kernels that ran, with how often.
  const std::map<std::string, int>& kernels() const { return kernels_; }
  const std::map<std::string, LaunchSize>& launch_sizes() const { return launch_sizes_; }
  bool record_traffic = false;
  int64_t most_shared = kLeastMostShared;  // bytes of a block
  const std::map<std::string, std::map<TrafficKey, Traffic>>& traffic() const { return traffic_; }

 private:
  friend class Machine;
  uint64_t random_;
  std::unique_ptr<Shadow> shadow_;
  std::string report_;
  std::map<std::string, int> kernels_;
  std::map<std::string, LaunchSize> launch_sizes_;
  std::map<std::string, std::map<TrafficKey, Traffic>> traffic_;
};

// Lets the calling thread's launches be watched by `session` (null: unchecked) while this lives.
class Watched {
 public:
  explicit Watched(Session* session);
  ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

 private:
  Session* before_;
};

// The error of the calling thread's last failed launch, watched or not.
const std::string& last_report();

}  // namespace simt
