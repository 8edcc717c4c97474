#include "ops/attention/blocked_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "ops/linear.h"

namespace twofold {
namespace {

constexpr int kWidenRows =
    16;  // query rows from which narrow keys and values are widened once for all of them
constexpr int kWidenPositions = 64;                   // at a time: 32 KiB of 128 floats
constexpr int kTasksPerThread = 4;                    // of about equal work, before tiles are cut into blocks
constexpr int64_t kPartialFloats = int64_t{1} << 24;  // for what blocks came to: 64 MiB

constexpr int64_t kFetchBytes = 32768;  // bytes of a block's keys or values prefetched before use

constexpr int kGroup = 32;  // of positions, by tiles
static_assert(kBlockPositions == kernels::TileAttention::kPositions);

constexpr float kNothing = -std::numeric_limits<float>::infinity();

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// Whether the level's tiles compute it: decided by the planes alone, because tiles round.
bool by_tiles(const kernels::KernelTable& table, const StatePlane& plane) {
  return table.tile_attention != nullptr && plane.dtype != kernels::DType::kF32 &&
         plane.width <= kernels::TileAttention::kMostColumns;
}

}  // namespace

// Per row: the largest score (scaled), the sum of the terms, the sum of the weighted values [rows, width].
struct BlockedAttention::Partial {
  float *peaks, *totals, *sums;

  static int64_t floats(int rows, int width) { return 2 * padded(rows) + padded(int64_t{rows} * width); }
  static Partial at(float* memory, int rows) {
    return {memory, memory + padded(rows), memory + 2 * padded(rows)};
  }
};

struct BlockedAttention::Rows {
  const AttentionBatch& batch;
  const AttentionTile& tile;
  int part, page_size, heads, num;  // rows: of heads and of all
  const StatePlane &keys, &values;
  const int32_t* list;  // positions of the one token; null: all positions
  const float* queries;
  float *room, *scores,
      *wide;  // [num, width], [num, kBlockPositions], [kWidenPositions, width], or a block for tiles

  int position(int row) const { return batch.position(tile.first_token + row / heads); }
  const int32_t* pages() const { return batch.pages(tile.first_token); }

  static int64_t floats(int rows, int key_width, int value_width) {
    const int width = std::max(key_width, value_width);
    return padded(int64_t{rows} * key_width) + int64_t{rows} * kBlockPositions +
           std::max(int64_t{kWidenPositions} * padded(width), kernels::TileAttention::block_bytes(width) / 4);
  }
  void place(float* memory) {
    room = memory;
    scores = room + padded(int64_t{num} * keys.width);
    wide = scores + int64_t{num} * kBlockPositions;
  }
};

struct BlockedAttention::Task {
  int tile, part, first_block, last_block;
  int split;  // the split that these blocks' partial results belong to; -1: the task has all blocks
};

const int32_t* BlockedAttention::list_of(const AttentionBatch& batch, int token, int part) const {
  if (select_.most == 0) return nullptr;
  const std::span<const int32_t> chosen = batch.chosen.of(token, part);
  return static_cast<int>(chosen.size()) > batch.position(token) ? nullptr : chosen.data();
}

BlockedAttention::Extent BlockedAttention::extent(const AttentionBatch& batch, int token, int part) const {
  const int position = batch.position(token), first = select_.stretch.first(position);
  const int32_t* list = list_of(batch, token, part);
  if (list == nullptr) return {first, batch.end(token, select_.bidirectional)};
  const int count = static_cast<int>(batch.chosen.of(token, part).size());
  return {kernels::PositionLists::entry_from(list, count, first), count};
}

BlockedAttention::Extent BlockedAttention::extent(const AttentionBatch& batch, const AttentionTile& tile,
                                                  int part) const {
  return {extent(batch, tile.first_token, part).first,
          extent(batch, tile.first_token + tile.num_tokens - 1, part).end};
}

// The tiles, with tokens that have lists in tiles of their own.
std::vector<AttentionTile> BlockedAttention::split_by_lists(const AttentionBatch& batch,
                                                            std::span<const AttentionTile> tiles) const {
  std::vector<AttentionTile> split;
  for (const AttentionTile& tile : tiles) {
    bool joins = false;
    for (int token = tile.first_token; token < tile.first_token + tile.num_tokens; ++token) {
      const bool listed = list_of(batch, token, 0) != nullptr;
      if (joins && !listed)
        ++split.back().num_tokens;
      else
        split.push_back({token, 1});
      joins = !listed;
    }
  }
  return split;
}

void BlockedAttention::run(const AttentionSource& source, const AttentionBatch& batch,
                           std::span<const AttentionTile> tiles, int page_size) const {
  const std::vector<AttentionTile> split_tiles =
      select_.most > 0 ? split_by_lists(batch, tiles) : std::vector<AttentionTile>{};
  if (select_.most > 0) tiles = split_tiles;
  const int parts = source.parts();
  int most_tokens = 0, most_heads = 0;
  double work = 0;  // query rows x positions
  std::vector<double> work_of(tiles.size());
  for (int part = 0; part < parts; ++part) most_heads = std::max(most_heads, source.heads(part));
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Extent all = extent(batch, tiles[i], 0);
    most_tokens = std::max(most_tokens, tiles[i].num_tokens);
    work += work_of[i] = static_cast<double>(tiles[i].num_tokens) * (all.end - all.first);
  }
  const int key_width = source.keys(0).width, value_width = source.values(0).width;
  const int most_rows = most_tokens * most_heads;
  const double bytes = static_cast<double>(source.keys(0).row_bytes + source.values(0).row_bytes);
  const bool alone = work_us(work * parts * bytes / most_tokens,
                             2.0 * work * parts * most_heads * (key_width + value_width)) < kForkUs;

  // A tile with more than its share of the work is cut into blocks, combined once all are computed.
  struct Split {
    Partial first;  // of consecutive ones
    int num_blocks;
  };
  std::vector<Task> tasks;
  std::vector<Split> splits;
  const int64_t partial = Partial::floats(most_rows, value_width);
  int64_t partials = 0;
  std::vector<Task> whole;
  for (size_t i = tiles.size();
       i-- > 0;) {  // high positions cost most: first, so that the last tasks are small
    for (int part = 0; part < parts; ++part) {
      const Extent all = extent(batch, tiles[i], part);
      const int begin = all.first / kBlockPositions, end = (all.end - 1) / kBlockPositions + 1;
      const bool cut = !alone && end - begin > 1 &&
                       work_of[i] * kTasksPerThread * pool_.num_threads() > work &&
                       (partials + end - begin) * partial <= kPartialFloats;
      const int tile = static_cast<int>(i);
      if (!cut) {
        whole.push_back({tile, part, begin, end, -1});
        continue;
      }
      const int split = static_cast<int>(splits.size());
      splits.push_back({{}, end - begin});
      partials += end - begin;
      for (int block = begin; block < end; ++block) tasks.push_back({tile, part, block, block + 1, split});
    }
  }
  tasks.insert(tasks.begin(), whole.begin(), whole.end());

  const int64_t own = Rows::floats(most_rows, key_width, value_width) + 2 * partial;
  float* const scratch = pool_.scratch_floats(slot_, own * pool_.num_threads());
  float* shared = pool_.scratch_floats(slot_ + 1, std::max<int64_t>(partials * partial, 1));
  for (Split& split : splits) {
    split.first = Partial::at(shared, most_rows);
    shared += split.num_blocks * partial;
  }
  const auto of_block = [&](const Split& split, int index) {
    return Partial::at(split.first.peaks + index * partial, most_rows);
  };
  const std::unique_ptr<Countdown[]> missing = std::make_unique<Countdown[]>(splits.size());
  for (size_t i = 0; i < splits.size(); ++i) missing[i].start(splits[i].num_blocks);

  const auto compute = [&](int64_t index, int thread) {
    const Task& task = tasks[static_cast<size_t>(index)];
    const AttentionTile& tile = tiles[static_cast<size_t>(task.tile)];
    const int heads = source.heads(task.part), num = heads * tile.num_tokens;
    float* memory = scratch + thread * own;
    Rows rows{batch,
              tile,
              task.part,
              page_size,
              heads,
              num,
              source.keys(task.part),
              source.values(task.part),
              list_of(batch, tile.first_token, task.part),
              {},
              {},
              {},
              {}};
    const Partial one = Partial::at(memory, most_rows), all = Partial::at(memory + partial, most_rows);
    rows.place(memory + 2 * partial);
    rows.queries = source.queries(tile, task.part, rows.room);
    if (task.split < 0) {
      for (int block = task.first_block; block < task.last_block; ++block) {
        add_block(rows, block, block == task.first_block ? all : one);
        if (block > task.first_block) merge(rows, one, all);
      }
      return finish(rows, all, source, tile, task.part);
    }
    const Split& split = splits[static_cast<size_t>(task.split)];
    const int first = extent(batch, tile, task.part).first / kBlockPositions;
    add_block(rows, task.first_block, of_block(split, task.first_block - first));
    if (!missing[static_cast<size_t>(task.split)].done()) return;
    for (int block = 1; block < split.num_blocks; ++block) merge(rows, of_block(split, block), split.first);
    finish(rows, split.first, source, tile, task.part);
  };
  if (alone) {
    for (size_t task = 0; task < tasks.size(); ++task) compute(static_cast<int64_t>(task), 0);
  } else {
    pool_.parallel_for(static_cast<int64_t>(tasks.size()), compute);
  }
}

void BlockedAttention::add_block(const Rows& rows, int block, const Partial& to) const {
  const int start = block * kBlockPositions;  // scores and weights are numbered from here
  const Extent all = extent(rows.batch, rows.tile, rows.part);
  const int first = std::max(0, all.first - start), end = std::min(kBlockPositions, all.end - start);
  if (first >= end) {  // no entry of a list is in its stretch
    std::fill(to.sums, to.sums + int64_t{rows.num} * rows.values.width, 0.0f);
    std::fill(to.peaks, to.peaks + rows.num, kNothing);
    std::fill(to.totals, to.totals + rows.num, 0.0f);
    return;
  }
  const int group_begin = first / kGroup * kGroup, group_end = (end + kGroup - 1) / kGroup * kGroup;
  add_scores(rows, start, first, end);
  const float scale =
      scores_.rule.scale * (rows.keys.dtype == kernels::DType::kFP8 ? kernels::kFP8Scale : 1.0f);
  Extent own = all;
  for (int row = 0; row < rows.num; ++row) {
    float* scores = rows.scores + int64_t{row} * kBlockPositions;
    // Each token's own part of the block; positions beyond it, used by other tokens of the tile, have weight
    // zero.
    if (row % rows.heads == 0) own = extent(rows.batch, rows.tile.first_token + row / rows.heads, rows.part);
    const int from = std::clamp(own.first - start, first, end);
    const int until = std::clamp(own.end - start, from, end);
    kernels::SoftmaxSum sum{kNothing, 0.0f};
    const float left = bend(scores + from, until - from, scale);
    if (from < until) sum = table_.softmax_exp(scores + from, until - from, left);
    std::fill(scores + group_begin, scores + from, 0.0f);
    std::fill(scores + until, scores + group_end, 0.0f);
    to.peaks[row] = sum.peak;
    to.totals[row] = sum.total;
  }
  add_values(rows, start, first, end, to.sums);
}

// Applies a rule that is not linear to n products; returns the factor that the softmax has to apply.
float BlockedAttention::bend(float* products, int n, float scale) const {
  const kernels::ScoreRule& rule = scores_.rule;
  if (rule.is_linear()) return scale;
  for (int i = 0; i < n; ++i) products[i] = rule.of(products[i] * scale);
  return 1.0f;
}

// Calls body(from, count, rows) as for_page_runs does, for positions or entries of the list [first, end).
template <class Body>
void BlockedAttention::for_runs(const Rows& rows, const StatePlane& plane, int first, int end, Body body) {
  const int32_t* const pages = rows.pages();
  if (rows.list == nullptr) return for_page_runs(plane, pages, rows.page_size, first, end, body);
  for (int i = first; i < end; ++i) {
    const int position = rows.list[i];
    body(i - first, 1,
         plane.page(pages[position / rows.page_size]) + position % rows.page_size * plane.row_bytes);
  }
}

// Begins to fetch rows of a block into the second-level cache, with as many lines as the core can request at a
// time; the reading loops alone would request a few. The hardware's prefetcher does not follow pages of several
// sequences and stops at every 4 KiB (a step of 16 sequences: 3 to 6 % less).
void BlockedAttention::fetch_rows(const Rows& rows, const StatePlane& plane, int first, int end) {
  end = static_cast<int>(std::min<int64_t>(end, first + kFetchBytes / plane.row_bytes));
  for_runs(rows, plane, first, end, [&](int, int count, const char* from) {
    const char* const last = from + count * plane.row_bytes;
    for (; from < last; from += 64) __builtin_prefetch(from, 0, 2);
  });
}

// Scores of positions [first, end) of the block that starts at `start`.
void BlockedAttention::add_scores(const Rows& rows, int start, int first, int end) const {
  const StatePlane& plane = rows.keys;
  const int D = plane.width;
  const bool tiles = by_tiles(table_, plane);
  fetch_rows(rows, plane, start + first, start + end);
  if (tiles) {
    for_runs(rows, plane, start + first, start + end, [&](int at, int count, const char* keys) {
      table_.tile_attention->put_keys(plane.dtype, keys, first + at, count, D, rows.wide);
    });
  } else {
    for_rows(rows, plane, start + first, start + end,
             [&](const kernels::RowKernels& kernel, int at, int count, const void* keys) {
               kernel.matmul(rows.queries, D, keys, rows.scores + first + at, kBlockPositions, rows.num,
                             count, D);
             });
  }
  fetch_rows(rows, rows.values, start + first, start + end);
  if (tiles)
    table_.tile_attention->scores(rows.queries, rows.num, rows.wide, first, end - first, D, rows.scores,
                                  kBlockPositions);
  scale_columns(rows, plane, start, first, end);
}

void BlockedAttention::add_values(const Rows& rows, int start, int first, int end, float* sums) const {
  const StatePlane& plane = rows.values;
  const int D = plane.width;
  const bool tiles = by_tiles(table_, plane);
  scale_columns(rows, plane, start, first, end);
  if (tiles) {  // a group of positions is added whole, with weight zero for missing ones
    const int64_t bytes = kernels::TileAttention::block_bytes(D) / kBlockPositions * kGroup;
    for (const int group : {first / kGroup, (end - 1) / kGroup})
      std::memset(reinterpret_cast<char*>(rows.wide) + group * bytes, 0, static_cast<size_t>(bytes));
  } else {
    std::fill(sums, sums + int64_t{rows.num} * D, 0.0f);
  }
  if (tiles) {
    for_runs(rows, plane, start + first, start + end, [&](int at, int count, const char* values) {
      table_.tile_attention->put_values(plane.dtype, values, first + at, count, D, rows.wide);
    });
    table_.tile_attention->weighted_sum(rows.scores, kBlockPositions, rows.num, rows.wide, first, end - first,
                                        D, sums);
    return;
  }
  for_rows(rows, plane, start + first, start + end,
           [&](const kernels::RowKernels& kernel, int at, int count, const void* values) {
             kernel.weighted_sum(rows.scores + first + at, kBlockPositions, values, sums, D, rows.num, count,
                                 D);
           });
}

// Calls body(kernel, from, count, rows) for rows of a plane: in place, widened for many query rows, or gathered from the
// positions of a list. Results are bit-identical.
template <class Body>
void BlockedAttention::for_rows(const Rows& rows, const StatePlane& plane, int first, int end,
                                Body body) const {
  const kernels::RowKernels& kernel = table_.rows_of(plane.dtype);
  const kernels::RowKernels& of_wide = table_.rows_of(kernels::DType::kF32);
  const bool widens = rows.num >= kWidenRows && plane.dtype != kernels::DType::kF32;
  if (rows.list == nullptr) {
    return for_runs(rows, plane, first, end, [&](int at, int count, const char* from) {
      if (!widens) return body(kernel, at, count, from);
      for (int j = 0; j < count; j += kWidenPositions) {
        const int here = std::min(kWidenPositions, count - j);
        kernel.widen(from + j * plane.row_bytes, rows.wide, int64_t{here} * plane.width);
        body(of_wide, at + j, here, rows.wide);
      }
    });
  }
  for (int i = first; i < end; i += kWidenPositions) {
    const int here = std::min(kWidenPositions, end - i);
    for_runs(rows, plane, i, i + here, [&](int at, int, const char* from) {
      if (widens)
        kernel.widen(from, rows.wide + int64_t{at} * plane.width, plane.width);
      else
        std::memcpy(reinterpret_cast<char*>(rows.wide) + at * plane.row_bytes, from,
                    static_cast<size_t>(plane.row_bytes));
    });
    fetch_rows(rows, plane, i + here, end);
    body(widens ? of_wide : kernel, i - first, here, rows.wide);
  }
}

// Scores, or weights, times the scales of the rows they belong to.
void BlockedAttention::scale_columns(const Rows& rows, const StatePlane& plane, int start, int first,
                                     int end) const {
  if (plane.scales == nullptr) return;
  const auto scale = [&](const float* scales, int at, int count) {
    for (int row = 0; row < rows.num; ++row)
      table_.multiply(scales, rows.scores + int64_t{row} * kBlockPositions + first + at, count);
  };
  float gathered[kBlockPositions];
  for_runs(rows, plane, start + first, start + end, [&](int at, int count, const char* from) {
    if (rows.list == nullptr)
      scale(plane.scales_of(from), at, count);
    else
      gathered[at] = *plane.scales_of(from);
  });
  if (rows.list != nullptr) scale(gathered, 0, end - first);
}

void BlockedAttention::merge(const Rows& rows, const Partial& from, const Partial& into) const {
  const int D = rows.values.width;
  for (int row = 0; row < rows.num; ++row) {
    if (from.peaks[row] == kNothing) continue;  // this row's window has not begun, or has ended
    const float peak = std::max(from.peaks[row], into.peaks[row]);
    const float kept = std::exp(into.peaks[row] - peak), added = std::exp(from.peaks[row] - peak);
    into.peaks[row] = peak;
    into.totals[row] = into.totals[row] * kept + from.totals[row] * added;
    float* to = into.sums + int64_t{row} * D;
    const float* sums = from.sums + int64_t{row} * D;
    for (int d = 0; d < D; ++d) to[d] = to[d] * kept + sums[d] * added;
  }
}

void BlockedAttention::finish(const Rows& rows, const Partial& all, const AttentionSource& source,
                              const AttentionTile& tile, int part) const {
  const int D = rows.values.width;
  const float scale = rows.values.dtype == kernels::DType::kFP8 ? kernels::kFP8Scale : 1.0f;
  const float* const sinks = scores_.sinks == nullptr ? nullptr : scores_.sinks + source.first_head(part);
  for (int row = 0; row < rows.num; ++row) {
    float kept = 1.0f, total = all.totals[row];
    if (sinks != nullptr) {
      const float sink = sinks[row % rows.heads], peak = std::max(all.peaks[row], sink);
      kept = std::exp(all.peaks[row] - peak);
      total = total * kept + std::exp(sink - peak);
    }
    const float share = total == 0.0f ? 0.0f : scale * kept / total;
    float* sums = all.sums + int64_t{row} * D;
    for (int d = 0; d < D; ++d) sums[d] *= share;
  }
  source.take(tile, part, all.sums);
}

void store_row(const kernels::KernelTable& table, const float* row, const StatePlane& plane, int64_t at) {
  char* to = plane.base + at * plane.row_bytes;
  switch (plane.dtype) {
    case kernels::DType::kF32:
      std::memcpy(to, row, static_cast<size_t>(plane.row_bytes));
      break;
    case kernels::DType::kBF16:
      table.f32_to_bf16(row, reinterpret_cast<uint16_t*>(to), plane.width);
      break;
    case kernels::DType::kI8:
      plane.scales[at] = table.f32_to_i8(row, reinterpret_cast<int8_t*>(to), plane.width);
      break;
    case kernels::DType::kFP8:
      table.f32_to_fp8(row, reinterpret_cast<uint8_t*>(to), plane.width);
      break;
  }
}

}  // namespace twofold
