// Owners of a DeviceApi's resources, and its errors as exceptions that name the flag to lower.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/device_api.h"

namespace twofold {

// The device or its driver failed: KernelError in Python.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// There is no room: CapacityError in Python. The message names the flag to lower.
class DeviceOutOfMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

// Throws the result as an exception, "device: could not <doing>: <the device's words>".
void require(const DeviceResult& result, const std::string& doing);

std::string gib_text(size_t bytes);

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // `what` and `remedy` go into the message: "4.00 GiB for 600 expert slots", "lower --num-gpu-experts".
  DeviceMemory(DeviceApi& api, size_t bytes, const std::string& what, const std::string& remedy);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }  // not for the host to read
  size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceMemory& other) {
    std::swap(api_, other.api_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  DeviceApi* api_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(DeviceApi& api, size_t bytes, const std::string& what);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::byte* device_address() const { return device_address_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(PinnedMemory& other) {
    std::swap(api_, other.api_);
    std::swap(data_, other.data_);
    std::swap(device_address_, other.device_address_);
    std::swap(bytes_, other.bytes_);
  }
  DeviceApi* api_ = nullptr;
  std::byte* data_ = nullptr;
  std::byte* device_address_ = nullptr;
  size_t bytes_ = 0;
};

// Pins host memory owned by the caller, for this object's lifetime. If the system refuses, the memory stays as
// it is and warning() describes the cost.
class PinnedRange {
 public:
  PinnedRange(DeviceApi& api, const std::byte* memory, size_t bytes, bool read_only, const std::string& what);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

  bool pinned() const { return pinned_; }
  std::byte* device_address() const { return device_address_; }  // null unless pinned
  const std::string& warning() const { return warning_; }

 private:
  DeviceApi& api_;
  const std::byte* memory_;  // null: nothing to pin
  std::byte* device_address_ = nullptr;
  bool pinned_ = false;
  std::string warning_;
};

class Stream {
 public:
  explicit Stream(DeviceApi& api);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  StreamHandle get() const { return handle_; }

 private:
  DeviceApi& api_;
  StreamHandle handle_;
};

// Events for reuse: making one costs more than recording it.
class EventPool {
 public:
  explicit EventPool(DeviceApi& api) : api_(api) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  EventHandle take();
  void release(EventHandle event) { free_.push_back(event); }

 private:
  DeviceApi& api_;
  std::vector<EventHandle> all_, free_;
};

}  // namespace twofold
