// The runtime's device interface, independent of CUDA: memory, streams, events, copies. Two implementations:
// the CUDA runtime (cuda/cuda_device.cpp) and the tests' fake device, on host memory with a clock of its own.
//
// Nothing here throws: a call returns its error as a value, in the device's words; device_memory.h turns it
// into exceptions that name what to change. One thread uses a device at a time.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <utility>

namespace twofold {

inline constexpr size_t kDeviceAlignment = 256;  // of device allocations, and of each expert slot

enum class DeviceCode : uint8_t {
  kOk,
  kNotReady,     // a query's answer: not an error
  kOutOfMemory,  // device or pinned memory
  kRefused,      // the system does not support this here (pinning, mapping)
  kFailed,
};

struct [[nodiscard]] DeviceResult {
  DeviceCode code = DeviceCode::kOk;
  std::string what;  // "" when ok

  bool ok() const { return code == DeviceCode::kOk; }
};

struct StreamHandle {
  void* raw = nullptr;
};

struct EventHandle {
  void* raw = nullptr;
};

struct HostToDevice {
  std::byte* to;  // device memory
  const std::byte* from;
  size_t bytes;
};

struct DeviceFacts {
  int index = 0;
  std::string name;
  size_t total_bytes = 0;
  size_t free_bytes = 0;
  std::string link;      // as the system describes it, e.g. "32.0 GT/s PCIe x16"; "" if unknown
  double link_gbps = 0;  // the link's maximum rate, one way; 0 if unknown
};

class DeviceApi {
 public:
  virtual ~DeviceApi() = default;

  virtual DeviceResult facts(DeviceFacts& out) = 0;
  // Microseconds of the host's monotonic clock.
  virtual double now_us() = 0;
  // The caller sleeps for about this long.
  virtual void sleep_us(double us) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
  }
  // The host is about to compute with data in device memory: refused unless that is host memory.
  virtual DeviceResult share_with_host() {
    return {DeviceCode::kRefused, "experts lie in device memory, which the host was asked to compute with"};
  }

  // At least aligned to kDeviceAlignment; contents are undefined.
  virtual DeviceResult allocate(size_t bytes, std::byte*& out) = 0;
  virtual void free(std::byte* memory) = 0;
  // Pinned host memory, which the device may read while the host continues; device_address is its address on
  // the device.
  virtual DeviceResult allocate_pinned(size_t bytes, std::byte*& out, std::byte*& device_address) = 0;
  virtual void free_pinned(std::byte* memory) = 0;
  // Pins and maps an existing range; read_only: the range may not be written, such as pages of a file mapped
  // read-only.
  virtual DeviceResult pin(const std::byte* memory, size_t bytes, bool read_only,
                           std::byte*& device_address) = 0;
  virtual void unpin(const std::byte* memory) = 0;

  virtual DeviceResult make_stream(StreamHandle& out) = 0;
  virtual void destroy(StreamHandle stream) = 0;
  virtual DeviceResult make_event(EventHandle& out) = 0;
  virtual void destroy(EventHandle event) = 0;

  // Records what the stream has been given so far; a later record replaces it.
  virtual DeviceResult record(EventHandle event, StreamHandle stream) = 0;
  // Work given to the stream from now on waits for the event as last recorded.
  virtual DeviceResult wait(StreamHandle stream, EventHandle event) = 0;
  virtual DeviceResult query(EventHandle event) = 0;  // kOk, kNotReady, or what failed before it
  virtual DeviceResult synchronise(EventHandle event) = 0;
  // Elapsed time between two completed events.
  virtual DeviceResult elapsed_us(EventHandle from, EventHandle to, double& out) = 0;

  // Asynchronous when `from` is pinned. After an error some of the copies may still be carried out: their
  // targets may not be used before an event recorded after them has completed.
  virtual DeviceResult copy(std::span<const HostToDevice> copies, StreamHandle stream) = 0;
};

}  // namespace twofold
