// Rows of a table that stays in its file, which may be larger than the machine's memory. Rows are read from the file when they
// are needed, and cached up to a bound of bytes; the file's mapping is not touched.
#pragma once
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "host/page_memory.h"
#include "host/thread_pool.h"
#include "ops/packed_matrix.h"

namespace twofold {

class RowTable {
 public:
  // parts: the table's rows in order, all of one format and number of columns; their memory is not owned. Rows that are not in
  // a mapped file are read in place. cache_bytes: most bytes of cached rows. Throws std::invalid_argument for no parts, or
  // parts that differ.
  RowTable(std::vector<SourceMatrix> parts, int64_t cache_bytes);
  ~RowTable();
  RowTable(const RowTable&) = delete;
  RowTable& operator=(const RowTable&) = delete;

  // Row ids[t * per_token + i] of token t as float32, exactly, to out + t * ld + i * columns(). Throws KernelFailure for an id
  // outside the table, for a row with a NaN or an infinity, and where the file cannot be read. One call at a time.
  void read(ThreadPool& pool, const int64_t* ids, int64_t num_tokens, int64_t per_token, float* out,
            int64_t ld);
  // Asks the system to read rows that are not cached, and does not wait for them. From any thread. Throws for an id outside.
  void read_ahead(const int64_t* ids, int64_t count);

  int64_t rows() const { return first_rows_.back(); }
  int64_t columns() const { return parts_.front().columns; }
  // Bytes of the whole table, and the most that the cache takes.
  int64_t bytes() const { return rows() * row_bytes_; }
  int64_t cache_bytes() const { return num_slots() * (slot_bytes_ + static_cast<int64_t>(sizeof(Tag))); }
  int64_t num_slots() const { return static_cast<int64_t>(tags_.size()); }
  // Rows asked for, and those among them that were in the cache.
  int64_t num_reads() const { return num_reads_; }
  int64_t num_hits() const { return num_hits_; }

 private:
  // What a slot holds. A row may be in any slot of its set; slots of a set are adjacent.
  struct Tag {
    int64_t row = -1;
    int64_t last_read = -1;  // number of the pass
  };
  // A part's file; descriptor -1: the part is read in place.
  struct Place {
    int descriptor = -1;
    int64_t offset = 0;
  };
  struct Fill {
    int64_t row, slot;
  };

  void open_files();
  size_t part_of(int64_t row) const;
  void check(const int64_t* ids, int64_t count) const;
  int64_t first_slot(int64_t row) const;
  // A row's slot and whether it is there already; -1: all of its set are in use by this pass.
  std::pair<int64_t, bool> place(int64_t row);
  void advise(int64_t row) const;
  // The row's bytes, in place or read to `room`; null where the file cannot be read.
  const std::byte* bytes_of(int64_t row, std::byte* room) const;
  void read_pass(ThreadPool& pool, const int64_t* ids, int64_t num_tokens, int64_t per_token, float* out,
                 int64_t ld);
  std::byte* slot(int64_t n) const { return memory_.data() + n * slot_bytes_; }

  std::vector<SourceMatrix> parts_;
  std::vector<Place> places_;        // one per part
  std::vector<int64_t> first_rows_;  // first row per part, then the number of rows
  std::vector<int> descriptors_;
  int64_t row_bytes_ = 0, slot_bytes_ = 0, ways_ = 0;
  PageMemory memory_;
  std::mutex mutex_;  // guards tags_
  std::vector<Tag> tags_;
  std::vector<Fill> fills_;
  std::vector<int64_t> slots_;  // one per row of a pass
  int64_t pass_ = 0, num_reads_ = 0, num_hits_ = 0;
};

}  // namespace twofold
