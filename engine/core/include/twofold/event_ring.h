// A bounded lock-free ring of trivially copyable events (after D. Vyukov's bounded queue): any number of
// producers, any number of consumers, no allocation after construction. A full ring drops the new event and
// counts it: the hot path never waits for telemetry.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace twofold {

template <typename Event>
class EventRing {
  static_assert(std::is_trivially_copyable_v<Event>, "events are copied as bytes");

 public:
  // capacity: a power of two >= 2.
  explicit EventRing(size_t capacity) : mask_(capacity - 1) {
    if (capacity < 2 || !std::has_single_bit(capacity)) {
      throw std::invalid_argument("EventRing: capacity " + std::to_string(capacity) +
                                  " given, a power of two >= 2 expected");
    }
    cells_ = std::make_unique<Cell[]>(capacity);
    for (size_t i = 0; i < capacity; ++i) cells_[i].sequence.store(i, std::memory_order_relaxed);
  }

  // False if the ring was full: the event is dropped and counted.
  bool push(const Event& event) {
    size_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      const size_t sequence = cell.sequence.load(std::memory_order_acquire);
      const auto distance = static_cast<std::ptrdiff_t>(sequence) - static_cast<std::ptrdiff_t>(position);
      if (distance == 0) {
        if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
          cell.event = event;
          cell.sequence.store(position + 1, std::memory_order_release);
          return true;
        }
      } else if (distance < 0) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return false;
      } else {
        position = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  bool pop(Event& event) {
    size_t position = head_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      const size_t sequence = cell.sequence.load(std::memory_order_acquire);
      const auto distance = static_cast<std::ptrdiff_t>(sequence) - static_cast<std::ptrdiff_t>(position + 1);
      if (distance == 0) {
        if (head_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
          event = cell.event;
          cell.sequence.store(position + mask_ + 1, std::memory_order_release);
          return true;
        }
      } else if (distance < 0) {
        return false;
      } else {
        position = head_.load(std::memory_order_relaxed);
      }
    }
  }

  // Moves up to out.size() events out, oldest first; returns how many.
  size_t drain(std::span<Event> out) {
    size_t count = 0;
    while (count < out.size() && pop(out[count])) ++count;
    return count;
  }

  size_t capacity() const { return mask_ + 1; }
  // Approximate while other threads push or pop, exact otherwise; for sizing a buffer.
  size_t size() const {
    const size_t head = head_.load(std::memory_order_relaxed);
    const size_t tail = tail_.load(std::memory_order_relaxed);
    return tail > head ? tail - head : 0;
  }
  // Events dropped since the last call of take_dropped.
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  uint64_t take_dropped() { return dropped_.exchange(0, std::memory_order_relaxed); }

 private:
  struct Cell {
    std::atomic<size_t> sequence{0};
    Event event{};
  };

  std::unique_ptr<Cell[]> cells_;
  size_t mask_;
  alignas(64) std::atomic<size_t> tail_{0};
  alignas(64) std::atomic<size_t> head_{0};
  alignas(64) std::atomic<uint64_t> dropped_{0};
};

}  // namespace twofold
