#include "machine/shadow.h"

#include <algorithm>

#include "machine/machine.h"

namespace simt {

namespace {

uint64_t bits(Moment moment, uint64_t from, uint64_t count) {
  return moment >> from & ((uint64_t{1} << count) - 1);
}
uint64_t launch_of(Moment m) { return m >> (64 - kLaunchBits); }
int64_t block_of(Moment m) { return int64_t(bits(m, kThreadBits + kTouchBits + kClockBits, kBlockBits)); }
int thread_of(Moment m) { return int(bits(m, kTouchBits + kClockBits, kThreadBits)); }
Touch touch_of(Moment m) { return Touch(bits(m, kClockBits, kTouchBits)); }
uint32_t clock_of(Moment m) { return uint32_t(bits(m, 0, kClockBits)); }
bool in_flight(Moment m) { return launch_of(m) == 0 && (m & ((Moment{1} << kClockBits) - 1)) == kInFlight; }

}  // namespace

// ---- accesses ----------------------------------------------------------------------------------------------

Moment Shadow::now(Machine& machine, Touch touch) const {
  const uint32_t clock = machine.self().known.clock;
  if (clock >> kClockBits != 0) machine.fail("passes more barriers than the machine can count");
  return launch_ << (64 - kLaunchBits) |
         uint64_t(machine.block_number()) << (kThreadBits + kTouchBits + kClockBits) |
         uint64_t(machine.thread()) << (kTouchBits + kClockBits) | uint64_t(touch) << kClockBits | clock;
}

bool Shadow::ordered(Machine& machine, Moment before, Touch touch) const {
  if (launch_of(before) != launch_) return true;
  const Known& known = machine.self().known;
  const bool same_block = block_of(before) == machine.block_number();
  if (same_block && thread_of(before) == machine.thread()) return true;
  const Touch was = touch_of(before);
  if (was != Touch::kPlain && touch != Touch::kPlain &&
      (same_block || (was != Touch::kBlockAtomic && touch != Touch::kBlockAtomic)))
    return true;
  return same_block ? known.has_seen(thread_of(before), clock_of(before))
                    : known.has_seen_of(block_of(before), thread_of(before), clock_of(before));
}

std::string Shadow::described(Machine& machine, Moment moment) const {
  if (block_of(moment) == machine.block_number())
    return "thread " + std::to_string(thread_of(moment)) + " of this block";
  return "block " + std::to_string(block_of(moment)) + ", thread " + std::to_string(thread_of(moment));
}

std::string Shadow::at(const Place& place, size_t bytes) const {
  return " of " + std::to_string(bytes) + " bytes at " + place.region->name + " +" + std::to_string(place.at);
}

// The cell of a byte, whose word then is split.
Cell& Shadow::word(const Place& place, size_t byte) {
  Cell& cell = place.region->cells[place.at / 4];
  if (cell.write != kSplit) {
    auto split = std::make_unique<Cell[]>(4);
    std::fill_n(split.get(), 4, cell);
    cell.reads[0] = reinterpret_cast<Moment>(split.get());
    cell.write = kSplit;
    bytes_of_words_.push_back(std::move(split));
  }
  return reinterpret_cast<Cell*>(cell.reads[0])[byte];
}

void Shadow::check(Machine& machine, Cell& cell, bool write, Touch touch, const Place& place, size_t bytes) {
  const Moment moment = now(machine, touch);
  if (!write && cell.reads[0] == moment) return;
  if (in_flight(cell.write)) {
    machine.fail(std::string(write ? "write" : "read") + at(place, bytes) + ", where a cp.async of " +
                 machine.name_of_thread(thread_of(cell.write)) +
                 " is in flight; look for wait_copies and a barrier before it");
  }
  if (!write && cell.write == kNever) machine.fail("read" + at(place, bytes) + " is not initialised");
  const char* between = "; look for the barrier between them";
  if (cell.write > kInFlight && !ordered(machine, cell.write, touch)) {
    machine.fail(
        "race: " + std::string(write ? "write" : "read") + at(place, bytes) + " and a write by " +
        described(machine, cell.write) +
        (block_of(cell.write) == machine.block_number() ? between : "; blocks of a launch have no order"));
  }
  if (write) {
    for (const Moment read : cell.reads) {
      if (read == 0 || ordered(machine, read, touch)) continue;
      machine.fail(
          "race: write" + at(place, bytes) + " and a read by " + described(machine, read) +
          (block_of(read) == machine.block_number() ? between : "; blocks of a launch have no order"));
    }
    // Atomics that nothing orders: those before this one stay, as a later plain access has to have seen them, too.
    Cell after{moment, {0, 0}};
    int kept = 0;
    for (const Moment earlier : {cell.write, cell.reads[0], cell.reads[1]}) {
      if (touch != Touch::kPlain && kept < 2 && earlier > kInFlight &&
          !ordered(machine, earlier, Touch::kPlain))
        after.reads[kept++] = earlier;
    }
    cell = after;
    return;
  }
  for (const Moment atomic : cell.reads) {
    if (atomic == 0 || touch_of(atomic) == Touch::kPlain || ordered(machine, atomic, touch)) continue;
    machine.fail("race: read" + at(place, bytes) + " and an atomic by " + described(machine, atomic) +
                 between);
  }
  // Replace what this read has seen; else one of the same warp, so that two warps stay.
  for (Moment& read : cell.reads) {
    if (read == 0 || ordered(machine, read, Touch::kPlain)) {
      read = moment;
      return;
    }
  }
  const auto same_warp = [&](Moment read) {
    return block_of(read) == machine.block_number() && thread_of(read) / kWarp == machine.thread() / kWarp;
  };
  cell.reads[same_warp(cell.reads[0]) && !same_warp(cell.reads[1]) ? 0 : 1] = moment;
}

void Shadow::access(Machine& machine, const void* address, size_t bytes, bool write, Touch touch) {
  const char* doing = write ? "write" : "read";
  const Place place = find(machine, address, bytes, doing);
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    machine.fail(std::string(doing) + at(place, bytes) + " is misaligned; look at offsets and row sizes");
  }
  Region& region = *place.region;
  if (region.kind == Memory::kMapped) check_mapped(machine, region, place.at, bytes, write, touch);
  for (size_t i = 0; i < bytes;) {
    const size_t offset = place.at + i;
    Cell& cell = region.cells[offset / 4];
    if (offset % 4 == 0 && bytes - i >= 4 && cell.write != kSplit) {
      check(machine, cell, write, touch, {&region, offset}, bytes);
      i += 4;
    } else {
      check(machine, word({&region, offset}, offset % 4), write, touch, {&region, offset}, bytes);
      ++i;
    }
  }
}

void Shadow::check_mapped(Machine& machine, Region& region, size_t offset, size_t bytes, bool write,
                          Touch touch) {
  const uint8_t* address = region.base + offset;
  const bool is_sync =
      std::find(region.sync_words.begin(), region.sync_words.end(), address) != region.sync_words.end();
  const Place place{&region, offset};
  if (touch == Touch::kPlain && is_sync) {
    machine.fail(std::string("plain ") + (write ? "write" : "read") + at(place, bytes) +
                 ", a word that is released or acquired; use store_release or load_acquire");
  }
  if (touch == Touch::kSync && !is_sync) {
    const Cell& cell = region.cells[offset / 4];
    if (cell.write != kSplit && (launch_of(cell.write) == launch_ || launch_of(cell.reads[0]) == launch_)) {
      machine.fail("release or acquire" + at(place, bytes) +
                   ", a word that this launch reads or writes without; use store_release or load_acquire");
    }
    region.sync_words.push_back(address);
  }
  if (write && touch == Touch::kPlain) {
    for (size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word)
      region.unreleased.push_back(word);
  }
  if (!write && touch == Touch::kPlain && !region.answered && offset >= region.answer_at &&
      offset < region.answer_at + region.answer_bytes) {
    machine.fail("read" + at(place, bytes) +
                 " of what the host writes, without an acquire since the last release; look for the wait");
  }
}

// ---- orders ------------------------------------------------------------------------------------------------

void Shadow::release(Machine& machine, uint32_t* word_address) {
  const Place place = find(machine, word_address, 4, "release");
  Region& region = *place.region;
  if (region.kind == Memory::kMapped) {
    for (const size_t number : region.unreleased) {
      const auto check_one = [&](const Cell& cell) {
        if (launch_of(cell.write) != launch_ || ordered(machine, cell.write, Touch::kPlain)) return;
        machine.fail("releases" + at(place, 4) + " while the write at +" + std::to_string(4 * number) +
                     " by " + described(machine, cell.write) +
                     " is not ordered before it; look for the barrier");
      };
      const Cell& cell = region.cells[number];
      if (cell.write != kSplit) {
        check_one(cell);
      } else {
        for (int i = 0; i < 4; ++i) check_one(reinterpret_cast<const Cell*>(cell.reads[0])[i]);
      }
    }
    region.unreleased.clear();
    region.released = true;
    region.answered = false;
  }
  access(machine, word_address, 4, true, Touch::kSync);
  Known& known = machine.self().known;
  published_[word_address] =
      released_by(known, machine.block_number(), machine.thread(), machine.num_threads());
  ++known.clock;
}

void Shadow::acquired(Machine& machine, const uint32_t* word_address) {
  access(machine, word_address, 4, false, Touch::kSync);
  const Place place = find(machine, word_address, 4, "acquire");
  if (place.region->kind == Memory::kMapped) place.region->answered = true;
  const auto found = published_.find(word_address);
  if (found != published_.end()) acquire(machine.self().known, machine.block_number(), found->second);
}

void Shadow::fence(Machine& machine) {
  const int64_t key = machine.block_number() * kMostThreads + machine.thread();
  Known& known = machine.self().known;
  const auto waiting = pending_.find(key);
  if (waiting != pending_.end()) {
    acquire(known, machine.block_number(), waiting->second);
    pending_.erase(waiting);
  }
  fenced_[key] = released_by(known, machine.block_number(), machine.thread(), machine.num_threads());
  ++known.clock;
}

void Shadow::atomic(Machine& machine, void* address, size_t bytes, Scope scope) {
  access(machine, address, bytes, true, scope == Scope::kBlock ? Touch::kBlockAtomic : Touch::kAtomic);
  const int64_t key = machine.block_number() * kMostThreads + machine.thread();
  Released& chain = published_[address];
  if (!chain.empty()) {
    Released& pending = pending_[key];
    pending.insert(pending.end(), chain.begin(), chain.end());
  }
  const auto before = fenced_.find(key);
  if (before != fenced_.end()) chain.insert(chain.end(), before->second.begin(), before->second.end());
}

void Shadow::begin_copy(Machine& machine, uint8_t* shared, const uint8_t* global, bool there,
                        Moment (&writes)[4]) {
  if (there) {
    access(machine, global, 16, false);
    const Place from = find(machine, global, 16, "cp.async");
    for (size_t i = 0; i < 4; ++i) writes[i] = from.region->cells[from.at / 4 + i].write;
  }
  if (!machine.in_shared(shared)) machine.fail("cp.async to memory that is not shared");
  access(machine, shared, 16, true);
  const Place to = find(machine, shared, 16, "cp.async");
  for (size_t i = 0; i < 4; ++i)
    to.region->cells[to.at / 4 + i] = {kInFlight | uint64_t(machine.thread()) << (kTouchBits + kClockBits),
                                       {0, 0}};
}

void Shadow::land_copy(Machine& machine, uint8_t* shared, const uint8_t* global, bool there,
                       const Moment (&writes)[4]) {
  if (there) {
    const Place from = find(machine, global, 16, "cp.async");
    for (size_t i = 0; i < 4; ++i) {
      if (from.region->cells[from.at / 4 + i].write != writes[i])
        machine.fail("the source of a cp.async" + at(from, 16) + " was written while it was in flight");
    }
  }
  const Place to = find(machine, shared, 16, "cp.async");
  for (size_t i = 0; i < 4; ++i) to.region->cells[to.at / 4 + i] = {now(machine, Touch::kPlain), {0, 0}};
}

}  // namespace simt
