// A device on host memory with a clock of its own, or that of another device, for tests: streams run in order, one
// link carries all copies one after the other, copies write garbage until they have ended, and everything can be made
// to fail.
//
// Nothing happens by itself: `run_until` moves the clock, so does reading it by tick_us, and waiting calls
// run it until they have what they wait for. The null stream is the caller itself: what it is given is done
// on return.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/device_api.h"

namespace twofold::fake {

struct DeviceShape {
  int index = 0;
  size_t total_bytes = size_t{1} << 30;
  double latency_us = 10;
  double bandwidth_gbps = 10;
  bool refuse_pinning = false;
  bool refuse_read_only = false;  // to pin read-only memory
  double tick_us = 0;             // how far the clock moves whenever it is read
  double most_delay_us = 0;       // a copy takes up to that much longer, at random
  double fail_issue = 0;          // probability that a copy call fails, some of its copies carried out
  double fail_completion = 0;     // probability that a copy ends in an error and garbage
  size_t small_bytes = 250'000;   // no batch may mix these with larger ones
  uint64_t seed = 0;
};

class Device final : public DeviceApi {
 public:
  // beside: a device of the same machine, whose clock this one shares.
  explicit Device(const DeviceShape& shape, const Device* beside = nullptr);
  ~Device() override;

  DeviceResult facts(DeviceFacts& out) override;
  double now_us() override;
  void sleep_us(double us) override { run_until(*now_us_ + us); }
  DeviceResult share_with_host() override { return {}; }
  DeviceResult allocate(size_t bytes, std::byte*& out) override;
  void free(std::byte* memory) override;
  DeviceResult allocate_pinned(size_t bytes, std::byte*& out, std::byte*& device_address) override;
  void free_pinned(std::byte* memory) override;
  DeviceResult pin(const std::byte* memory, size_t bytes, bool read_only,
                   std::byte*& device_address) override;
  void unpin(const std::byte* memory) override;
  DeviceResult make_stream(StreamHandle& out) override;
  void destroy(StreamHandle stream) override;
  DeviceResult make_event(EventHandle& out) override;
  void destroy(EventHandle event) override;
  DeviceResult record(EventHandle event, StreamHandle stream) override;
  DeviceResult wait(StreamHandle stream, EventHandle event) override;
  DeviceResult query(EventHandle event) override;
  DeviceResult synchronise(EventHandle event) override;
  DeviceResult elapsed_us(EventHandle from, EventHandle to, double& out) override;
  DeviceResult copy(std::span<const HostToDevice> copies, StreamHandle stream) override;

  // A kernel: `begins` when the stream has come to it and `ready` says so, `ends` after us.
  void launch(StreamHandle stream, double us, std::function<void()> begins, std::function<void()> ends,
              std::function<bool()> ready = nullptr);
  void run_until(double us);
  // Until nothing is left that can run.
  void run_all();
  void set_failures(double issue, double completion);

  const std::byte* never_fails = nullptr;  // copies to here do not
  size_t used_bytes() const { return used_; }
  // Leaks and misuse that were seen; empty when all is well.
  std::string complaints() const;
  int largest_batch = 0;
  int num_mixed_batches = 0;
  int num_copies = 0;

 private:
  enum class Kind : uint8_t { kCopy, kRecord, kWait, kKernel };
  struct Event {
    int64_t recorded = 0;  // how often
    int64_t passed = 0;
    double at_us = 0;
    bool failed = false;
  };
  struct Work {
    Kind kind;
    double issued_us;
    HostToDevice copy{};
    double us = 0;
    bool fails = false;
    Event* event = nullptr;
    int64_t record = 0;
    std::function<void()> begins = nullptr, ends = nullptr;
    std::function<bool()> ready = nullptr;
    bool begun = false;
    double end_us = 0;
  };
  struct Lane {
    std::deque<Work> queue;
    double free_us = 0;
    bool failed = false;  // since the last event: it carries the failure
  };
  // Begins or ends the work that is next in time and not later than us; false if there is none.
  bool step(double us);
  Lane& lane(StreamHandle stream) {
    return stream.raw == nullptr ? *lanes_.front() : *static_cast<Lane*>(stream.raw);
  }
  // What the null stream was given has passed.
  DeviceResult finish(StreamHandle stream);
  bool chance(double probability);

  DeviceShape shape_;
  std::mt19937_64 random_;
  std::shared_ptr<double> now_us_;
  double link_free_us_ = 0;
  bool link_busy_ = false;
  size_t used_ = 0;
  std::vector<std::pair<std::byte*, size_t>> allocations_, pinned_;
  std::vector<std::pair<const std::byte*, size_t>> ranges_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // the first is the null stream's
  std::set<Event*> events_;
  std::string complaint_;
};

}  // namespace twofold::fake
