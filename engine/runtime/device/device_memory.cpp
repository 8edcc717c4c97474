#include "device/device_memory.h"

#include <cstdio>

namespace twofold {

std::string gib_text(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f GiB", double(bytes) / (1024.0 * 1024.0 * 1024.0));
  return text;
}

void require(const DeviceResult& result, const std::string& doing) {
  if (result.ok()) return;
  const std::string message = "the device could not " + doing + ": " + result.what;
  if (result.code == DeviceCode::kOutOfMemory) {
    throw DeviceOutOfMemory(message + "; lower --gpu-memory-utilization or --max-total-tokens");
  }
  throw DeviceError(message);
}

DeviceMemory::DeviceMemory(DeviceApi& api, size_t bytes, const std::string& what, const std::string& remedy)
    : api_(&api), bytes_(bytes) {
  const DeviceResult result = api.allocate(bytes, data_);
  if (result.ok()) return;
  const std::string message =
      "the device has no room for " + what + " (" + gib_text(bytes) + "): " + result.what;
  if (result.code == DeviceCode::kOutOfMemory) throw DeviceOutOfMemory(message + "; " + remedy);
  throw DeviceError(message);
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) api_->free(data_);
}

PinnedMemory::PinnedMemory(DeviceApi& api, size_t bytes, const std::string& what)
    : api_(&api), bytes_(bytes) {
  const DeviceResult result = api.allocate_pinned(bytes, data_, device_address_);
  if (result.ok()) return;
  const std::string message =
      "no pinned host memory for " + what + " (" + gib_text(bytes) + "): " + result.what;
  if (result.code == DeviceCode::kOutOfMemory) {
    throw DeviceOutOfMemory(message + "; free host memory or raise the limit on locked memory (ulimit -l)");
  }
  throw DeviceError(message);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) api_->free_pinned(data_);
}

PinnedRange::PinnedRange(DeviceApi& api, const std::byte* memory, size_t bytes, bool read_only,
                         const std::string& what)
    : api_(api), memory_(bytes == 0 ? nullptr : memory), pinned_(bytes == 0) {
  if (pinned_) return;
  const DeviceResult result = api.pin(memory, bytes, read_only, device_address_);
  pinned_ = result.ok();
  if (pinned_) return;
  device_address_ = nullptr;
  warning_ =
      what + " (" + gib_text(bytes) + ") could not be pinned (" + result.what +
      "): uploads are copied once more on the host and are slower, and the GPU cannot read experts in place; "
      "raise the limit on locked memory (ulimit -l)";
}

PinnedRange::~PinnedRange() {
  if (pinned_ && memory_ != nullptr) api_.unpin(memory_);
}

Stream::Stream(DeviceApi& api) : api_(api) { require(api.make_stream(handle_), "make a stream"); }

Stream::~Stream() { api_.destroy(handle_); }

EventHandle EventPool::take() {
  if (free_.empty()) {
    EventHandle event;
    require(api_.make_event(event), "make an event");
    all_.push_back(event);
    return event;
  }
  const EventHandle event = free_.back();
  free_.pop_back();
  return event;
}

EventPool::~EventPool() {
  for (EventHandle event : all_) api_.destroy(event);
}

}  // namespace twofold
