#include "fake_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace twofold::fake {

namespace {

DeviceResult failure(DeviceCode code, const char* what) { return {code, what}; }

}  // namespace

Device::Device(const DeviceShape& shape, const Device* beside)
    : shape_(shape),
      random_(shape.seed),
      now_us_(beside == nullptr ? std::make_shared<double>(0) : beside->now_us_) {
  lanes_.push_back(std::make_unique<Lane>());
}

Device::~Device() {
  for (auto& [memory, bytes] : allocations_) std::free(memory);
  for (auto& [memory, bytes] : pinned_) std::free(memory);
  for (Event* event : events_) delete event;
}

bool Device::chance(double probability) {
  return probability > 0 && std::uniform_real_distribution<>(0, 1)(random_) < probability;
}

void Device::set_failures(double issue, double completion) {
  shape_.fail_issue = issue;
  shape_.fail_completion = completion;
}

double Device::now_us() {
  if (shape_.tick_us > 0) run_until(*now_us_ + shape_.tick_us);
  return *now_us_;
}

DeviceResult Device::finish(StreamHandle stream) {
  if (stream.raw != nullptr) return {};
  while (!lanes_.front()->queue.empty()) {
    if (!step(std::numeric_limits<double>::infinity()))
      return failure(DeviceCode::kFailed, "waits for ever: nothing on the device can go on");
  }
  return {};
}

DeviceResult Device::facts(DeviceFacts& out) {
  out = {shape_.index, "fake device",        shape_.total_bytes, shape_.total_bytes - used_,
         "fake",       shape_.bandwidth_gbps};
  return {};
}

DeviceResult Device::allocate(size_t bytes, std::byte*& out) {
  if (bytes > shape_.total_bytes - used_) return failure(DeviceCode::kOutOfMemory, "out of memory");
  out = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(out, 0xEE, bytes);
  used_ += bytes;
  allocations_.emplace_back(out, bytes);
  return {};
}

void Device::free(std::byte* memory) {
  const auto at = std::find_if(allocations_.begin(), allocations_.end(),
                               [memory](const auto& a) { return a.first == memory; });
  if (at == allocations_.end()) {
    complaint_ = "memory was freed that was not allocated";
    return;
  }
  // A copy that still runs would write into memory that has another owner.
  for (const auto& lane : lanes_) {
    for (const Work& work : lane->queue) {
      if (work.kind == Kind::kCopy && work.copy.to >= memory && work.copy.to < memory + at->second)
        complaint_ = "memory was freed with a copy into it under way";
    }
  }
  used_ -= at->second;
  std::free(memory);
  allocations_.erase(at);
}

DeviceResult Device::allocate_pinned(size_t bytes, std::byte*& out, std::byte*& device_address) {
  out = device_address = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  pinned_.emplace_back(out, bytes);
  return {};
}

void Device::free_pinned(std::byte* memory) {
  const auto at =
      std::find_if(pinned_.begin(), pinned_.end(), [memory](const auto& a) { return a.first == memory; });
  for (const auto& lane : lanes_) {
    for (const Work& work : lane->queue) {
      if (work.kind == Kind::kCopy && work.copy.from >= memory && work.copy.from < memory + at->second)
        complaint_ = "pinned memory was freed with a copy from it under way";
    }
  }
  pinned_.erase(at);
  std::free(memory);
}

DeviceResult Device::pin(const std::byte* memory, size_t bytes, bool read_only, std::byte*& device_address) {
  if (shape_.refuse_pinning || (read_only && shape_.refuse_read_only))
    return failure(DeviceCode::kRefused, "operation not permitted");
  device_address = const_cast<std::byte*>(memory);
  ranges_.emplace_back(memory, bytes);
  return {};
}

void Device::unpin(const std::byte* memory) {
  std::erase_if(ranges_, [memory](const auto& range) { return range.first == memory; });
}

DeviceResult Device::make_stream(StreamHandle& out) {
  lanes_.push_back(std::make_unique<Lane>());
  out.raw = lanes_.back().get();
  return {};
}

void Device::destroy(StreamHandle stream) {
  for (const Work& work : lane(stream).queue) {
    if (work.kind == Kind::kCopy) complaint_ = "a stream was destroyed with a copy under way";
  }
  std::erase_if(lanes_, [stream](const auto& l) { return l.get() == stream.raw; });
}

DeviceResult Device::make_event(EventHandle& out) {
  Event* event = new Event;
  events_.insert(event);
  out.raw = event;
  return {};
}

void Device::destroy(EventHandle event) {
  for (const auto& lane : lanes_) {
    for (Work& work : lane->queue) {
      if (work.event == event.raw) work.event = nullptr;
    }
  }
  events_.erase(static_cast<Event*>(event.raw));
  delete static_cast<Event*>(event.raw);
}

DeviceResult Device::record(EventHandle event, StreamHandle stream) {
  Event* e = static_cast<Event*>(event.raw);
  lane(stream).queue.push_back(
      {.kind = Kind::kRecord, .issued_us = *now_us_, .event = e, .record = ++e->recorded});
  return finish(stream);
}

DeviceResult Device::wait(StreamHandle stream, EventHandle event) {
  Event* e = static_cast<Event*>(event.raw);
  lane(stream).queue.push_back(
      {.kind = Kind::kWait, .issued_us = *now_us_, .event = e, .record = e->recorded});
  return finish(stream);
}

DeviceResult Device::query(EventHandle event) {
  run_until(*now_us_);
  const Event* e = static_cast<Event*>(event.raw);
  if (e->passed < e->recorded) return failure(DeviceCode::kNotReady, "not ready");
  return e->failed ? failure(DeviceCode::kFailed, "a copy failed on its way") : DeviceResult{};
}

DeviceResult Device::synchronise(EventHandle event) {
  const Event* e = static_cast<Event*>(event.raw);
  while (e->passed < e->recorded) {
    if (!step(std::numeric_limits<double>::infinity()))
      return failure(DeviceCode::kFailed, "waits for ever: nothing on the device can go on");
  }
  return query(event);
}

DeviceResult Device::elapsed_us(EventHandle from, EventHandle to, double& out) {
  out = static_cast<Event*>(to.raw)->at_us - static_cast<Event*>(from.raw)->at_us;
  return {};
}

DeviceResult Device::copy(std::span<const HostToDevice> copies, StreamHandle stream) {
  largest_batch = std::max(largest_batch, int(copies.size()));
  int small = 0;
  for (const HostToDevice& copy : copies) small += copy.bytes < shape_.small_bytes;
  num_mixed_batches += small > 0 && small < int(copies.size());
  const bool exempt = copies.front().to == never_fails;
  const bool fails = !exempt && chance(shape_.fail_issue);
  size_t count = fails ? copies.size() / 2 : copies.size();
  bool first = true;
  for (const HostToDevice& copy : copies.first(count)) {
    bool known = false;
    for (const auto& [memory, bytes] : allocations_)
      known |= copy.to >= memory && copy.to + copy.bytes <= memory + bytes;
    if (!known) complaint_ = "a copy goes to memory that is not the device's";
    const double delay =
        shape_.most_delay_us > 0 ? std::uniform_real_distribution<>(0, shape_.most_delay_us)(random_) : 0;
    lane(stream).queue.push_back(
        {.kind = Kind::kCopy,
         .issued_us = *now_us_,
         .copy = copy,
         .us = (first ? shape_.latency_us : 0) + delay + double(copy.bytes) / (shape_.bandwidth_gbps * 1e3),
         .fails = !exempt && chance(shape_.fail_completion)});
    first = false;
    ++num_copies;
  }
  if (fails) return failure(DeviceCode::kFailed, "the copy was refused");
  return finish(stream);
}

void Device::launch(StreamHandle stream, double us, std::function<void()> begins, std::function<void()> ends,
                    std::function<bool()> ready) {
  lane(stream).queue.push_back({.kind = Kind::kKernel,
                                .issued_us = *now_us_,
                                .us = us,
                                .begins = std::move(begins),
                                .ends = std::move(ends),
                                .ready = std::move(ready)});
}

bool Device::step(double us) {
  Lane* next = nullptr;
  double next_us = std::numeric_limits<double>::infinity();
  for (const auto& lane : lanes_) {
    if (lane->queue.empty()) continue;
    const Work& work = lane->queue.front();
    double at = std::max({work.issued_us, lane->free_us});
    if (work.begun) {
      at = work.end_us;
    } else if (work.kind == Kind::kWait) {
      if (work.event != nullptr && work.event->passed < work.record) continue;
      at = std::max(at, *now_us_);
    } else if (work.kind == Kind::kKernel && work.ready) {
      if (!work.ready()) continue;
      at = std::max(at, *now_us_);
    } else if (work.kind == Kind::kCopy) {
      if (link_busy_) continue;
      at = std::max(at, link_free_us_);
    }
    if (at < next_us) {
      next_us = at;
      next = lane.get();
    }
  }
  if (next == nullptr || next_us > us) return false;
  *now_us_ = std::max(*now_us_, next_us);
  Work& work = next->queue.front();
  if (!work.begun && (work.kind == Kind::kCopy || work.kind == Kind::kKernel)) {
    work.begun = true;
    work.end_us = std::max(next_us, work.issued_us) + work.us;
    if (work.kind == Kind::kCopy) {
      link_busy_ = true;
      std::memset(work.copy.to, 0xDD, work.copy.bytes);  // a torn copy
    } else if (work.begins) {
      work.begins();
    }
    return true;
  }
  next->free_us = next_us;
  if (work.kind == Kind::kCopy) {
    link_busy_ = false;
    link_free_us_ = work.end_us;
    if (work.fails) {
      next->failed = true;
    } else {
      std::memcpy(work.copy.to, work.copy.from, work.copy.bytes);
    }
  } else if (work.kind == Kind::kKernel) {
    // It may launch more: the queue must not hold it any longer.
    const auto ends = std::move(work.ends);
    next->queue.pop_front();
    if (ends) ends();
    return true;
  } else if (work.kind == Kind::kRecord && work.event != nullptr) {
    work.event->passed = work.record;
    work.event->at_us = next_us;
    work.event->failed = next->failed;
    next->failed = false;
  }
  next->queue.pop_front();
  return true;
}

void Device::run_until(double us) {
  while (step(us)) {
  }
  *now_us_ = std::max(*now_us_, us);
}

void Device::run_all() {
  while (step(std::numeric_limits<double>::infinity())) {
  }
}

std::string Device::complaints() const { return complaint_; }

}  // namespace twofold::fake
