#include "ops/row_table.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <stdexcept>
#include <string>

#include "host/mapped_files.h"
#include "host/work_clock.h"
#include "ops/linear.h"
#include "ops/tensor_view.h"

namespace twofold {
namespace {

constexpr int64_t kWays = 8;           // slots of a set
constexpr int64_t kRowsOfPass = 4096;  // rows that the disk is asked for at once
constexpr double kReadUs = 2.0;        // time of a row that the page cache has

// Spreads neighbouring rows over the sets.
uint64_t mixed(int64_t row) {
  const uint64_t value = static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15u;
  return value ^ (value >> 32);
}

bool is_finite(const float* row, int64_t count) {
  constexpr uint32_t kExponent = 0x7F800000;
  uint32_t wrong = 0;
  for (int64_t n = 0; n < count; ++n)
    wrong |= static_cast<uint32_t>((std::bit_cast<uint32_t>(row[n]) & kExponent) == kExponent);
  return wrong == 0;
}

}  // namespace

RowTable::RowTable(std::vector<SourceMatrix> parts, int64_t cache_bytes) : parts_(std::move(parts)) {
  if (parts_.empty()) throw std::invalid_argument("RowTable: no parts were given; expected at least one");
  const SourceMatrix& first = parts_.front();
  row_bytes_ = first.row_stride;
  first_rows_.push_back(0);
  for (const SourceMatrix& part : parts_) {
    if (part.columns != first.columns || part.format != first.format || part.row_stride != row_bytes_) {
      throw std::invalid_argument("RowTable: parts have rows of " + std::to_string(first.columns) + " and " +
                                  std::to_string(part.columns) +
                                  " columns or of several formats; expected equal ones");
    }
    first_rows_.push_back(first_rows_.back() + part.rows);
  }
  open_files();
  slot_bytes_ = static_cast<int64_t>(round_up(static_cast<size_t>(row_bytes_), kCacheLine));
  const int64_t each = slot_bytes_ + static_cast<int64_t>(sizeof(Tag));
  const int64_t slots = descriptors_.empty() ? 0 : std::min(cache_bytes / each, rows());
  ways_ = std::clamp<int64_t>(slots, 0, kWays);
  if (ways_ == 0) return;
  tags_.resize(static_cast<size_t>(slots / ways_ * ways_));
  memory_ = PageMemory(static_cast<size_t>(num_slots() * slot_bytes_), false);
}

RowTable::~RowTable() {
  for (const int descriptor : descriptors_) (void)close(descriptor);
}

void RowTable::open_files() {
  std::map<int, int> opened;  // descriptor by number of the watched file
  for (const SourceMatrix& part : parts_) {
    const auto [number, offset] = watched_place(part.data, static_cast<size_t>(part.rows * part.row_stride));
    Place place{-1, offset};
    if (number >= 0) {
      const auto [at, is_new] = opened.try_emplace(number, -1);
      if (is_new) at->second = open_watched(number);
      place.descriptor = at->second;
    }
    places_.push_back(place);
  }
  for (const auto& [number, descriptor] : opened) {
    if (descriptor < 0) continue;
    descriptors_.push_back(descriptor);
    // A read brings its own page alone: rows in use are far from one another.
    (void)posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM);
  }
}

size_t RowTable::part_of(int64_t row) const {
  const auto after = std::upper_bound(first_rows_.begin(), first_rows_.end(), row);
  return static_cast<size_t>(after - first_rows_.begin()) - 1;
}

void RowTable::check(const int64_t* ids, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < rows()) continue;
    throw KernelFailure("RowTable: row " + std::to_string(ids[i]) + " was asked for; the table has " +
                        std::to_string(rows()) + " rows");
  }
}

int64_t RowTable::first_slot(int64_t row) const {
  const auto sets = static_cast<uint64_t>(num_slots() / ways_);
  return static_cast<int64_t>(mixed(row) % sets) * ways_;
}

std::pair<int64_t, bool> RowTable::place(int64_t row) {
  if (ways_ == 0) return {-1, false};
  const int64_t first = first_slot(row);
  Tag* const set = tags_.data() + first;
  int64_t oldest = 0;
  for (int64_t n = 0; n < ways_; ++n) {
    if (set[n].row == row) {
      set[n].last_read = pass_;
      return {first + n, true};
    }
    if (set[n].last_read < set[oldest].last_read) oldest = n;
  }
  if (set[oldest].last_read == pass_) return {-1, false};
  set[oldest] = {row, pass_};
  return {first + oldest, false};
}

void RowTable::advise(int64_t row) const {
  const size_t part = part_of(row);
  if (places_[part].descriptor < 0) return;
  const int64_t at = places_[part].offset + (row - first_rows_[part]) * row_bytes_;
  (void)posix_fadvise(places_[part].descriptor, at, row_bytes_, POSIX_FADV_WILLNEED);
}

const std::byte* RowTable::bytes_of(int64_t row, std::byte* room) const {
  const size_t part = part_of(row);
  const int64_t within = row - first_rows_[part];
  if (places_[part].descriptor < 0) return parts_[part].row(within);
  for (int64_t done = 0; done < row_bytes_;) {
    const ssize_t count = pread(places_[part].descriptor, room + done, static_cast<size_t>(row_bytes_ - done),
                                places_[part].offset + within * row_bytes_ + done);
    if (count <= 0) return nullptr;
    done += count;
  }
  return room;
}

void RowTable::read_pass(ThreadPool& pool, const int64_t* ids, int64_t num_tokens, int64_t per_token,
                         float* out, int64_t ld) {
  const int64_t count = num_tokens * per_token;
  slots_.resize(static_cast<size_t>(count));
  fills_.clear();
  {
    const std::lock_guard lock(mutex_);
    ++pass_;
    for (int64_t i = 0; i < count; ++i) {
      const auto [slot, is_there] = place(ids[i]);
      slots_[static_cast<size_t>(i)] = slot;
      if (!is_there) fills_.push_back({ids[i], slot});
    }
  }
  num_reads_ += count;
  num_hits_ += count - std::ssize(fills_);
  if (fills_.size() > 1)
    for (const Fill& fill : fills_) advise(fill.row);
  std::atomic<int64_t> unread = -1, wrong = -1;
  const auto fills = std::ssize(fills_);
  for_ranges(pool, fills, 1, kReadUs * static_cast<double>(fills), [&](int64_t first, int64_t num) {
    for (int64_t i = first; i < first + num; ++i) {
      const Fill& fill = fills_[static_cast<size_t>(i)];
      if (fill.slot < 0) continue;
      const std::byte* const found = bytes_of(fill.row, slot(fill.slot));
      if (found == nullptr)
        unread.store(fill.row, std::memory_order_relaxed);
      else if (found != slot(fill.slot))
        std::copy_n(found, row_bytes_, slot(fill.slot));
    }
  });
  const double elements = static_cast<double>(count * columns());
  for_ranges(pool, count, 1, work_us(4.0 * elements, 30.0 * elements), [&](int64_t first, int64_t num) {
    std::vector<std::byte> room;
    for (int64_t i = first; i < first + num; ++i) {
      const int64_t at = slots_[static_cast<size_t>(i)];
      if (at < 0) room.resize(static_cast<size_t>(row_bytes_));
      const std::byte* const found = at < 0 ? bytes_of(ids[i], room.data()) : slot(at);
      if (found == nullptr) {
        unread.store(ids[i], std::memory_order_relaxed);
        continue;
      }
      const size_t part = part_of(ids[i]);
      float* const row = out + i / per_token * ld + i % per_token * columns();
      kernels::dequantise_row(parts_[part].format, found, parts_[part].row_scales(ids[i] - first_rows_[part]),
                              columns(), row);
      if (!is_finite(row, columns())) wrong.store(ids[i], std::memory_order_relaxed);
    }
  });
  if (unread < 0 && wrong < 0) return;
  {
    const std::lock_guard lock(mutex_);
    std::fill(tags_.begin(), tags_.end(), Tag{});
  }
  if (unread >= 0) {
    throw KernelFailure("row " + std::to_string(unread) +
                        " of a table cannot be read; the file has become shorter or its disk fails");
  }
  throw KernelFailure("row " + std::to_string(wrong) +
                      " of a table holds a NaN or an infinity; the file is damaged, download it again");
}

void RowTable::read(ThreadPool& pool, const int64_t* ids, int64_t num_tokens, int64_t per_token, float* out,
                    int64_t ld) {
  const WorkTimer timer(Work::kEmbedding);
  check(ids, num_tokens * per_token);
  const int64_t tokens_of_pass = std::max<int64_t>(1, kRowsOfPass / std::max<int64_t>(1, per_token));
  for (int64_t t = 0; t < num_tokens; t += tokens_of_pass) {
    read_pass(pool, ids + t * per_token, std::min(tokens_of_pass, num_tokens - t), per_token, out + t * ld,
              ld);
  }
}

void RowTable::read_ahead(const int64_t* ids, int64_t count) {
  if (descriptors_.empty()) return;
  check(ids, count);
  std::vector<int64_t> wanted(ids, ids + count);
  if (ways_ > 0) {
    const std::lock_guard lock(mutex_);
    std::erase_if(wanted, [&](int64_t row) {
      const auto set = tags_.begin() + first_slot(row);
      return std::any_of(set, set + ways_, [&](const Tag& tag) { return tag.row == row; });
    });
  }
  for (const int64_t row : wanted) advise(row);
}

}  // namespace twofold
