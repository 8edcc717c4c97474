#include "ops/attention/attention_batch.h"

#include <algorithm>
#include <limits>
#include <string>

namespace twofold {
namespace {

// Consecutive tokens of one sequence at consecutive positions, in tiles of at most `tile_tokens`.
std::vector<AttentionTile> cut(const std::vector<int32_t>& positions, const std::vector<int32_t>& sequences,
                               int tile_tokens) {
  std::vector<AttentionTile> tiles;
  for (size_t i = 0; i < positions.size(); ++i) {
    const bool joins = !tiles.empty() && tiles.back().num_tokens < tile_tokens &&
                       sequences[i] == sequences[i - 1] && positions[i] == positions[i - 1] + 1;
    if (joins) {
      ++tiles.back().num_tokens;
    } else {
      tiles.push_back({static_cast<int>(i), 1});
    }
  }
  return tiles;
}

}  // namespace

AttentionBatch::AttentionBatch(const TensorView& positions, const TensorView& sequence_index,
                               const TensorView& page_tables, const TensorView& rope_cos,
                               const TensorView& rope_sin, const TensorView* records) {
  const int32_t* position = expect_i32(positions, "AttentionBatch: positions", {kAny});
  const int64_t T = positions.shape[0];
  const int32_t* sequence = expect_i32(sequence_index, "AttentionBatch: sequence_index", {T});
  const int32_t* table = expect_i32(page_tables, "AttentionBatch: page_tables", {kAny, kAny});
  num_sequences_ = static_cast<int>(page_tables.shape[0]);
  max_pages_ = static_cast<int>(page_tables.shape[1]);
  for (int64_t t = 0; t < T; ++t) {
    if (position[t] < 0) {
      throw KernelFailure("AttentionBatch: position " + std::to_string(position[t]) + " of token " +
                          std::to_string(t) + " is negative");
    }
    if (sequence[t] < 0 || sequence[t] >= num_sequences_) {
      throw KernelFailure("AttentionBatch: sequence_index " + std::to_string(sequence[t]) + " of token " +
                          std::to_string(t) + " is outside the " + std::to_string(num_sequences_) +
                          " sequences of page_tables");
    }
  }
  positions_.assign(position, position + T);
  sequence_index_.assign(sequence, sequence + T);
  page_tables_.assign(table, table + page_tables.shape[0] * page_tables.shape[1]);
  if (records != nullptr) {
    const int32_t* numbers = expect_i32(*records, "AttentionBatch: records", {page_tables.shape[0]});
    records_.assign(numbers, numbers + num_sequences_);
  }
  add_rotation(rope_cos, rope_sin);
}

void AttentionBatch::add_rotation(const TensorView& cos, const TensorView& sin) {
  const int64_t T = num_tokens();
  const float* cosine = expect_f32(cos, "AttentionBatch: rope_cos", {T, kAny});
  const int64_t pairs = cos.shape[1];
  const float* sine = expect_f32(sin, "AttentionBatch: rope_sin", {T, pairs});
  rotations_.push_back({{cosine, cosine + T * pairs}, {sine, sine + T * pairs}, static_cast<int>(pairs)});
}

void AttentionBatch::keep_records(const TensorView& numbers) {
  const int32_t* kept = expect_i32(numbers, "AttentionBatch.keep_records: numbers", {num_tokens()});
  kept_records_.assign(kept, kept + num_tokens());
  checked_records_ = -1;
}

void AttentionBatch::see_until(const TensorView& ends) {
  const int32_t* end = expect_i32(ends, "AttentionBatch.see_until: ends", {num_tokens()});
  std::vector<int32_t> lengths(static_cast<size_t>(num_sequences_), 0);
  for (size_t t = 0; t < positions_.size(); ++t) {
    int32_t& length = lengths[static_cast<size_t>(sequence_index_[t])];
    length = std::max(length, positions_[t] + 1);
  }
  for (size_t t = 0; t < positions_.size(); ++t) {
    const bool falls = t > 0 && sequence_index_[t] == sequence_index_[t - 1] && end[t] < end[t - 1];
    if (end[t] <= positions_[t] || end[t] > lengths[static_cast<size_t>(sequence_index_[t])] || falls) {
      throw KernelFailure(
          "AttentionBatch.see_until: token " + std::to_string(t) + " at position " +
          std::to_string(positions_[t]) + " attends up to before " + std::to_string(end[t]) +
          "; expected a later position, at most the one after its sequence's last in the batch, " +
          "that never falls along a sequence");
    }
  }
  ends_.assign(end, end + num_tokens());
}

void AttentionBatch::check_pages(const StateCache& cache) {
  if (checked_pages_ == cache.num_pages() && checked_page_size_ == cache.page_size()) return;
  std::vector<int32_t> needed(static_cast<size_t>(num_sequences_), 0);
  for (int t = 0; t < num_tokens(); ++t) {
    int32_t& pages = needed[static_cast<size_t>(sequence_index_[static_cast<size_t>(t)])];
    pages = std::max(pages, position(t) / cache.page_size() + 1);
  }
  for (size_t s = 0; s < needed.size(); ++s) {
    if (needed[s] > max_pages_) {
      throw KernelFailure("AttentionBatch: sequence " + std::to_string(s) + " needs " +
                          std::to_string(needed[s]) + " pages of " + std::to_string(cache.page_size()) +
                          " positions, but page_tables has " + std::to_string(max_pages_) + " per sequence");
    }
    for (int32_t p = 0; p < needed[s]; ++p) {
      const int32_t page = page_tables_[s * static_cast<size_t>(max_pages_) + static_cast<size_t>(p)];
      if (page < 0 || page >= cache.num_pages()) {
        throw KernelFailure("AttentionBatch: page_tables[" + std::to_string(s) + ", " + std::to_string(p) +
                            "] is " + std::to_string(page) + "; the cache has pages 0 to " +
                            std::to_string(cache.num_pages() - 1));
      }
    }
  }
  checked_pages_ = cache.num_pages();
  checked_page_size_ = cache.page_size();
}

void AttentionBatch::check_records(const StateCache& cache) {
  if (checked_records_ == cache.num_records()) return;
  if (records_.empty() && num_tokens() > 0) {
    throw KernelFailure(
        "AttentionBatch: records were not given; the model's layers keep one of each sequence");
  }
  std::vector<bool> used(static_cast<size_t>(cache.num_records()));
  const auto use = [&](int number) {
    if (number < 0 || number >= cache.num_records()) {
      throw KernelFailure("AttentionBatch: a record is " + std::to_string(number) +
                          "; the cache has records 0 to " + std::to_string(cache.num_records() - 1));
    }
    if (used[static_cast<size_t>(number)]) {
      throw KernelFailure("AttentionBatch: record " + std::to_string(number) +
                          " is used twice; expected consecutive tokens of each sequence, and kept "
                          "records of their own");
    }
    used[static_cast<size_t>(number)] = true;
  };
  for (const AttentionTile& run : runs()) use(record(run.first_token));
  for (const int32_t number : kept_records_) {
    if (number != -1) use(number);
  }
  checked_records_ = cache.num_records();
}

const std::vector<AttentionTile>& AttentionBatch::tiles(int tile_tokens) {
  if (tile_tokens_ != tile_tokens) tiles_ = cut(positions_, sequence_index_, tile_tokens);
  tile_tokens_ = tile_tokens;
  return tiles_;
}

const std::vector<AttentionTile>& AttentionBatch::runs() {
  if (runs_.empty()) runs_ = cut(positions_, sequence_index_, std::numeric_limits<int>::max());
  return runs_;
}

}  // namespace twofold
