#include "ops/state_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace twofold {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 46;

void at_least(int least, const char* name, int value) {
  if (value < least) {
    throw std::invalid_argument(std::string("StateCache: ") + name + " is " + std::to_string(value) +
                                "; expected at least " + std::to_string(least));
  }
}

// Adds up sizes and checks that the total is addressable.
class Sum {
 public:
  // Returns the offset of the added part: a product of sizes, none negative.
  int64_t add(std::initializer_list<int64_t> sizes) {
    const int64_t offset = total_;
    int64_t bytes = 1;
    for (const int64_t size : sizes) {
      if (__builtin_mul_overflow(bytes, size, &bytes)) refuse();
    }
    if (__builtin_add_overflow(total_, bytes, &total_) || total_ > kMostBytes) refuse();
    return offset;
  }
  int64_t total() const { return total_; }

 private:
  [[noreturn]] static void refuse() {
    throw std::invalid_argument(
        "StateCache: the layers' pages and records are beyond 64 TiB; "
        "lower the number of pages");
  }
  int64_t total_ = 0;
};

}  // namespace

StateCache::StateCache(std::span<const LayerState> layers, int num_pages, int page_size, int num_records)
    : num_pages_(num_pages), page_size_(page_size), num_records_(num_records) {
  at_least(1, "num_layers", static_cast<int>(layers.size()));
  at_least(1, "num_pages", num_pages);
  at_least(1, "page_size", page_size);
  at_least(0, "num_records", num_records);
  Sum sum;
  std::vector<int64_t> offsets;
  for (const LayerState& state : layers) {
    Layer& layer = layers_.emplace_back(Layer{{}, nullptr, state.record_bytes});
    for (const Planes& planes : state.planes) {
      at_least(1, "a layer's number of planes", planes.count);
      at_least(1, "a plane's width", planes.width);
      const int64_t row_bytes = planes.width * kernels::element_bytes(planes.dtype);
      for (int i = 0; i < planes.count; ++i) {
        offsets.push_back(sum.add({row_bytes, num_pages, page_size}));
        layer.planes.push_back({nullptr, planes.width, planes.dtype, row_bytes, row_bytes * page_size});
        page_bytes_ += row_bytes * page_size;
        if (planes.dtype != kernels::DType::kI8) continue;
        page_bytes_ += static_cast<int64_t>(sizeof(float)) * page_size;
        if (sum.total() % 4 != 0) sum.add({4 - sum.total() % 4});
        offsets.push_back(sum.add({static_cast<int64_t>(sizeof(float)), num_pages, page_size}));
      }
    }
    if (state.record_bytes < 0) throw std::invalid_argument("StateCache: a record's size is negative");
    // Records begin on a cache line, and so does what follows them.
    if (state.record_bytes > 0 && sum.total() % 64 != 0) sum.add({64 - sum.total() % 64});
    offsets.push_back(sum.add({state.record_bytes, num_records}));
    if (state.record_bytes > 0 && sum.total() % 64 != 0) sum.add({64 - sum.total() % 64});
    record_bytes_ += state.record_bytes;
  }
  bytes_ = sum.total();
  void* memory = mmap(nullptr, static_cast<size_t>(bytes_ > 0 ? bytes_ : 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(memory);
  const int64_t* offset = offsets.data();
  for (Layer& layer : layers_) {
    for (StatePlane& plane : layer.planes) {
      plane.base = base_ + *offset++;
      if (plane.dtype == kernels::DType::kI8) plane.scales = reinterpret_cast<float*>(base_ + *offset++);
    }
    layer.records = reinterpret_cast<std::byte*>(base_ + *offset++);
  }
}

StateCache::~StateCache() { munmap(base_, static_cast<size_t>(bytes_ > 0 ? bytes_ : 1)); }

void StateCache::resize(int num_pages, std::span<const std::pair<int, int>> kept, bool keep_records) {
  std::vector<LayerState> states;
  for (const Layer& layer : layers_) {
    LayerState& state = states.emplace_back(LayerState{{}, layer.record_bytes});
    for (const StatePlane& plane : layer.planes) state.planes.push_back({1, plane.width, plane.dtype});
  }
  StateCache other(states, num_pages, page_size_, num_records_);
  for (const auto& [from, to] : kept) {
    check_page(from);
    other.check_page(to);
  }
  // Plane by plane, so that adjacent pages are read and written in memory order.
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    for (size_t p = 0; p < layer.planes.size(); ++p) {
      const StatePlane &source = layer.planes[p], &target = other.layers_[l].planes[p];
      for (const auto& [from, to] : kept) {
        std::memcpy(target.page(to), source.page(from), static_cast<size_t>(source.page_bytes));
        if (source.scales == nullptr) continue;
        std::copy_n(source.scales + int64_t{from} * page_size_, page_size_,
                    target.scales + int64_t{to} * page_size_);
      }
    }
    if (keep_records && num_records_ > 0 && layer.record_bytes > 0) {
      std::memcpy(other.layers_[l].records, layer.records,
                  static_cast<size_t>(layer.record_bytes) * static_cast<size_t>(num_records_));
    }
  }
  std::swap(num_pages_, other.num_pages_);
  std::swap(layers_, other.layers_);
  std::swap(bytes_, other.bytes_);
  std::swap(base_, other.base_);
}

void StateCache::check_record(int record) const {
  if (record < 0 || record >= num_records_) {
    throw std::out_of_range("StateCache: record " + std::to_string(record) + " of " +
                            std::to_string(num_records_));
  }
}

std::span<std::byte> StateCache::record(int layer, int record) const {
  check_record(record);
  const Layer& at = layers_.at(static_cast<size_t>(layer));
  return {at.records + record * at.record_bytes, static_cast<size_t>(at.record_bytes)};
}

void StateCache::check_page(int page) const {
  if (page < 0 || page >= num_pages_) {
    throw std::out_of_range("StateCache: page " + std::to_string(page) + " of " + std::to_string(num_pages_));
  }
}

void StateCache::fork_page(int from, int to) {
  check_page(from);
  check_page(to);
  if (from == to) return;
  for (const Layer& layer : layers_) {
    for (const StatePlane& plane : layer.planes) {
      std::memcpy(plane.page(to), plane.page(from), static_cast<size_t>(plane.page_bytes));
      if (plane.scales == nullptr) continue;
      std::copy_n(plane.scales + int64_t{from} * page_size_, page_size_,
                  plane.scales + int64_t{to} * page_size_);
    }
  }
}

void StateCache::fork_record(int from, int to) {
  check_record(from);
  check_record(to);
  if (from == to) return;
  for (const Layer& layer : layers_) {
    std::memcpy(layer.records + to * layer.record_bytes, layer.records + from * layer.record_bytes,
                static_cast<size_t>(layer.record_bytes));
  }
}

std::vector<std::byte> StateCache::page_snapshot(int number) const {
  check_page(number);
  std::vector<std::byte> all(static_cast<size_t>(page_bytes_));
  std::byte* to = all.data();
  for (const Layer& layer : layers_) {
    for (const StatePlane& plane : layer.planes) {
      std::memcpy(to, plane.page(number), static_cast<size_t>(plane.page_bytes));
      to += plane.page_bytes;
      if (plane.scales == nullptr) continue;
      const size_t scale_bytes = sizeof(float) * static_cast<size_t>(page_size_);
      std::memcpy(to, plane.scales + int64_t{number} * page_size_, scale_bytes);
      to += scale_bytes;
    }
  }
  return all;
}

void StateCache::restore_page(int number, std::span<const std::byte> snapshot) {
  check_page(number);
  if (snapshot.size() != static_cast<size_t>(page_bytes_)) {
    throw std::invalid_argument("StateCache: a page of " + std::to_string(snapshot.size()) +
                                " bytes is not of these layers, whose pages have " +
                                std::to_string(page_bytes_));
  }
  const std::byte* from = snapshot.data();
  for (const Layer& layer : layers_) {
    for (const StatePlane& plane : layer.planes) {
      std::memcpy(plane.page(number), from, static_cast<size_t>(plane.page_bytes));
      from += plane.page_bytes;
      if (plane.scales == nullptr) continue;
      const size_t scale_bytes = sizeof(float) * static_cast<size_t>(page_size_);
      std::memcpy(plane.scales + int64_t{number} * page_size_, from, scale_bytes);
      from += scale_bytes;
    }
  }
}

std::vector<std::byte> StateCache::snapshot(int number) const {
  check_record(number);
  std::vector<std::byte> all;
  all.reserve(static_cast<size_t>(record_bytes_));
  for (int layer = 0; layer < num_layers(); ++layer) {
    const std::span<const std::byte> bytes = record(layer, number);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void StateCache::restore(int number, std::span<const std::byte> snapshot) {
  check_record(number);
  if (snapshot.size() != static_cast<size_t>(record_bytes_)) {
    throw std::invalid_argument("StateCache: a snapshot of " + std::to_string(snapshot.size()) +
                                " bytes is not of these layers, whose records have " +
                                std::to_string(record_bytes_));
  }
  const std::byte* from = snapshot.data();
  for (int layer = 0; layer < num_layers(); ++layer) {
    const std::span<std::byte> bytes = record(layer, number);
    if (!bytes.empty()) std::memcpy(bytes.data(), from, bytes.size());
    from += bytes.size();
  }
}

}  // namespace twofold
