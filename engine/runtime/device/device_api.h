// What the runtime needs of a device, and nothing of CUDA: memory, streams, events, copies. Two answers: the
// CUDA runtime (cuda/cuda_device.cpp) and the fake device of the tests, on host memory with a clock of its own.
//
// Nothing here throws: a call says what went wrong as a value, in the device's words; device_memory.h turns
// it into exceptions that name what to change. One thread uses a device at a time.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <utility>

namespace twofold {

inline constexpr size_t kDeviceAlignment = 256;  // of what a device gives out, and of each expert slot

enum class DeviceCode : uint8_t {
  kOk,
  kNotReady,     // a query's answer: not an error
  kOutOfMemory,  // of the device or of pinned memory
  kRefused,      // the system does not do this here (pinning, mapping)
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
  std::string link;      // as the system describes it, e.g. "32.0 GT/s PCIe x16"; "" where unknown
  double link_gbps = 0;  // what that link carries at most, one way; 0 where unknown
};

class DeviceApi {
 public:
  virtual ~DeviceApi() = default;

  virtual DeviceResult facts(DeviceFacts& out) = 0;
  // Microseconds of the host's monotonic clock.
  virtual double now_us() = 0;
  // The caller sleeps for about so long.
  virtual void sleep_us(double us) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
  }
  // The host is about to compute with what lies in device memory: refused but where that is host memory.
  virtual DeviceResult lend_to_host() {
    return {DeviceCode::kRefused, "experts lie in device memory, which the host was asked to compute with"};
  }

  // At least aligned to kDeviceAlignment; contents are undefined.
  virtual DeviceResult allocate(size_t bytes, std::byte*& out) = 0;
  virtual void free(std::byte* memory) = 0;
  // Pinned host memory, which the device may read while the host goes on; device_address is where it sees it.
  virtual DeviceResult allocate_pinned(size_t bytes, std::byte*& out, std::byte*& device_address) = 0;
  virtual void free_pinned(std::byte* memory) = 0;
  // Pins and maps a range that exists; read_only: nobody may write it, as pages of a file that is mapped so.
  virtual DeviceResult pin(const std::byte* memory, size_t bytes, bool read_only,
                           std::byte*& device_address) = 0;
  virtual void unpin(const std::byte* memory) = 0;

  virtual DeviceResult make_stream(StreamHandle& out) = 0;
  virtual void destroy(StreamHandle stream) = 0;
  virtual DeviceResult make_event(EventHandle& out) = 0;
  virtual void destroy(EventHandle event) = 0;

  // The event stands for what the stream was given so far; a later record replaces it.
  virtual DeviceResult record(EventHandle event, StreamHandle stream) = 0;
  // What the stream is given from now on waits for the event as it was recorded last.
  virtual DeviceResult wait(StreamHandle stream, EventHandle event) = 0;
  virtual DeviceResult query(EventHandle event) = 0;  // kOk, kNotReady, or what failed before it
  virtual DeviceResult synchronise(EventHandle event) = 0;
  // Between two events that have passed.
  virtual DeviceResult elapsed_us(EventHandle from, EventHandle to, double& out) = 0;

  // Asynchronous when `from` is pinned. After an error some of the copies may still be carried out: nobody
  // may use their targets before an event recorded behind them has passed.
  virtual DeviceResult copy(std::span<const HostToDevice> copies, StreamHandle stream) = 0;
};

}  // namespace twofold
