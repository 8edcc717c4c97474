// Memory regions, and what a launch and a block reset.
#include <algorithm>

#include "machine/machine.h"
#include "machine/shadow.h"

namespace simt {

namespace {

constexpr size_t kPage = 4096;

}  // namespace

void Shadow::begin_launch() {
  launch_ = (launch_ + 1) & ((uint64_t{1} << kLaunchBits) - 1);
  if (launch_ == 0) launch_ = 1;
  published_.clear();
  fenced_.clear();
  pending_.clear();
  if (pages_.size() > 4096) pages_.clear();
  for (auto& [base, region] : regions_) {
    region->released = false;
    region->unreleased.clear();
    region->sync_words = region->known_words;
  }
}

std::string Shadow::end_launch() {
  for (auto& [base, region] : regions_) {
    if (region->released && !region->unreleased.empty()) {
      return "ends with writes to " + region->name + " after its last release, first at +" +
             std::to_string(4 * region->unreleased.front()) + ": the host may never see them; release again";
    }
  }
  return "";
}

void Shadow::begin_block(size_t dynamic_bytes) {
  shared_.clear();
  bytes_of_words_.shrink_to_fit();
  if (dynamic_bytes > 0) add_static(0, dynamic_bytes);
}

void Shadow::add_static(size_t at, size_t bytes) {
  auto region = std::make_unique<Region>();
  region->name = at == 0 ? "dynamic shared memory" : "static shared memory";
  region->base = Machine::of_this_thread().shared_ + at;
  region->bytes = bytes;
  region->kind = Memory::kUninitialised;
  region->cells.resize((bytes + 3) / 4);
  shared_.push_back(std::move(region));
}

void Shadow::add(const std::string& name, const uint8_t* memory, size_t bytes, Memory kind) {
  const std::lock_guard lock(mutex);
  // What lay there before is forgotten.
  std::erase_if(regions_, [&](const auto& entry) {
    return entry.first < memory + bytes && memory < entry.first + entry.second->bytes;
  });
  last_ = nullptr;
  auto region = std::make_unique<Region>();
  region->name = name;
  region->base = memory;
  region->bytes = bytes;
  region->kind = kind;
  const Moment write = kind == Memory::kUninitialised ? kNever : kByHost;
  region->cells.assign((bytes + 3) / 4, Cell{write, {0, 0}});
  regions_[memory] = std::move(region);
}

std::string Shadow::remove(const uint8_t* memory) {
  const std::lock_guard lock(mutex);
  const auto found = regions_.find(memory);
  if (found == regions_.end()) return "memory was freed that is no region";
  if (found->second->gone) return found->second->name + " was freed twice";
  found->second->gone = true;
  found->second->cells = {};
  return "";
}

void Shadow::written_by_host(const uint8_t* memory, size_t bytes) {
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < bytes; ++i) {
    Region* region = region_of(memory + i);
    if (region == nullptr || region->gone) continue;
    const size_t at = size_t(memory + i - region->base);
    Cell& cell = region->cells[at / 4];
    if (cell.write == kSplit)
      reinterpret_cast<Cell*>(cell.reads[0])[at % 4] = {kByHost, {0, 0}};
    else if (at % 4 == 0 && i + 4 <= bytes)
      cell = {kByHost, {0, 0}}, i += 3;
    else
      word({region, at}, at % 4) = {kByHost, {0, 0}};
  }
}

void Shadow::host_answers(const uint8_t* memory, size_t bytes) {
  const std::lock_guard lock(mutex);
  Region* region = region_of(memory);
  if (region == nullptr) return;
  region->answer_at = size_t(memory - region->base);
  region->answer_bytes = bytes;
}

void Shadow::hands_over(const uint8_t* word) {
  const std::lock_guard lock(mutex);
  if (Region* region = region_of(word)) region->known_words.push_back(word);
}

void Shadow::acquired_by_stream(const uint8_t* mapped) {
  const std::lock_guard lock(mutex);
  if (Region* region = region_of(mapped)) region->answered = true;
}

Shadow::Region* Shadow::region_of(const uint8_t* address) {
  if (last_ != nullptr && size_t(address - last_->base) < last_->bytes) return last_;
  auto after = regions_.upper_bound(address);
  if (after == regions_.begin()) return nullptr;
  Region* region = std::prev(after)->second.get();
  if (size_t(address - region->base) >= region->bytes) return nullptr;
  return last_ = region;
}

Shadow::Place Shadow::find(Machine& machine, const void* address, size_t bytes, const char* doing) {
  const auto* p = static_cast<const uint8_t*>(address);
  if (machine.in_shared(p)) {
    for (auto& region : shared_) {
      const size_t offset = size_t(p - region->base);
      if (p < region->base || offset >= region->bytes + 64) continue;
      if (offset + bytes > region->bytes) {
        machine.fail(std::string(doing) + " of " + std::to_string(bytes) + " bytes at " + region->name +
                     " +" + std::to_string(offset) + " is out of bounds: it has " +
                     std::to_string(region->bytes) +
                     "; look at the index and at the bytes that the launch asks for");
      }
      return {region.get(), offset};
    }
    machine.fail(std::string(doing) + " of " + std::to_string(bytes) +
                 " bytes of shared memory that the launch did not ask for is out of bounds, at +" +
                 std::to_string(p - machine.shared_));
  }
  if (Region* region = region_of(p)) {
    const size_t offset = size_t(p - region->base);
    if (region->gone) {
      machine.fail(std::string(doing) + " at " + region->name + " +" + std::to_string(offset) +
                   ", which has been freed; look for a stale address");
    }
    if (offset + bytes > region->bytes) {
      machine.fail(std::string(doing) + " of " + std::to_string(bytes) + " bytes at " + region->name + " +" +
                   std::to_string(offset) + " is out of bounds: it has " + std::to_string(region->bytes));
    }
    return {region, offset};
  }
  if (mode_ == Mode::kStrict) {
    std::string near;
    auto after = regions_.upper_bound(p);
    if (after != regions_.begin()) {
      const Region& region = *std::prev(after)->second;
      near = ", " + std::to_string(p - region.base - int64_t(region.bytes)) + " bytes behind the end of " +
             region.name + " (" + std::to_string(region.bytes) + " bytes)";
    }
    if (after != regions_.end() && (near.empty() || after->first - p < 4096)) {
      near += ", " + std::to_string(after->first - p) + " bytes before " + after->second->name;
    }
    machine.fail(std::string(doing) + " of " + std::to_string(bytes) + " bytes is out of bounds" +
                 (near.empty() ? ": no region is there" : near) + "; look at the index");
  }
  const uintptr_t page = reinterpret_cast<uintptr_t>(p) / kPage;
  auto& region = pages_[page];
  if (region == nullptr) {
    region = std::make_unique<Region>();
    region->name = "memory of the host's allocator";
    region->base = reinterpret_cast<const uint8_t*>(page * kPage);
    region->bytes = kPage;
    region->cells.assign(kPage / 4, Cell{kByHost, {0, 0}});
  }
  return {region.get(), size_t(p - region->base)};
}

}  // namespace simt
