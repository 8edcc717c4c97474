#include "ops/sampling/sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

namespace twofold {
namespace {

using kernels::SamplingKernels;
using kernels::WeightScale;

constexpr int kMostBuckets = 1024;
constexpr int kBlock =
    512;  // elements looked at together: what is found of them lies in the first-level cache
constexpr size_t kLargeRow = 65'536;     // below, blocks are smaller, so that top-k finds enough of them
constexpr size_t kLeastShared = 16'384;  // below, sharing a row costs more than it saves
constexpr int64_t kLeastSharedMask = 262'144;  // logits; below, waking threads takes longer
constexpr int kSegmentsPerThread = 4;          // so that awake threads need not wait for sleeping ones
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr uint32_t kMinusInfinity = std::bit_cast<uint32_t>(-kInfinity);
// Each bit of a byte as 32 equal ones. With it 65,536 logits are masked in 0.02 ms, bit by bit in 0.08 ms.
constexpr auto kSpread = [] {
  std::array<std::array<uint32_t, 8>, 256> spread = {};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    for (uint32_t lane = 0; lane < 8; ++lane) spread[bits][lane] = (bits >> lane & 1u) != 0 ? ~0u : 0u;
  }
  return spread;
}();

void mask_eight(float* values, uint8_t allowed) {
  std::array<uint32_t, 8> bits;
  std::memcpy(bits.data(), values, sizeof bits);
  const std::array<uint32_t, 8>& kept = kSpread[allowed];
  for (size_t lane = 0; lane < bits.size(); ++lane)
    bits[lane] = (bits[lane] & kept[lane]) | (kMinusInfinity & ~kept[lane]);
  std::memcpy(values, bits.data(), sizeof bits);
}

// Contents of each bucket, for a part of a row.
struct Tally {
  std::array<uint64_t, kMostBuckets> mass;
  std::array<uint32_t, kMostBuckets> count;  // only where top-k asks
};

// Floats as integers in the same order; -0 and 0 are equal.
uint32_t ordered(float v) {
  const auto bits = std::bit_cast<uint32_t>(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Sampling state of one row. Unless the token is certain already, call `tally` for all of `size`, then `pick`;
// parts of the tally may run concurrently.
class Row {
 public:
  Row(const SamplingKernels& kernels, std::span<const float> logits, const Draw& draw)
      : kernels_(kernels), draw_(draw), values_(logits) {
    block_ = cuts_top_k() && logits.size() < kLargeRow ? kBlock / 8 : kBlock;
    peaks_.resize((logits.size() + block_ - 1) / block_);
    lows_.resize(peaks_.size());
    for (size_t b = 0; b < peaks_.size(); ++b) {
      const auto part = logits.subspan(b * block_, std::min(block_, logits.size() - b * block_));
      kernels_.extremes(part.data(), static_cast<int64_t>(part.size()), &lows_[b], &peaks_[b]);
    }
    highest_ = *std::max_element(peaks_.begin(), peaks_.end());
    if (is_certain()) return;
    factor_ = std::min(1.0 / draw_.temperature, 1e300) / std::log(2.0);
    bits_ = std::min(51, 63 - static_cast<int>(std::bit_width(logits.size())));
    const float from = narrow();
    const double lowest = std::max(from, *std::min_element(lows_.begin(), lows_.end()));
    num_buckets_ = values_.size() <= 256 ? 1 : values_.size() <= kLeastShared ? 256 : kMostBuckets;
    double range = (static_cast<double>(highest_) - lowest) * factor_;
    const double all = bits_ + 1;  // beyond this every weight is 0
    if (!(range < all)) range = all;
    const double last = num_buckets_ - 1;
    scale_ = {highest_, factor_, static_cast<double>(bits_), range > 1e-9 ? last / range : 0.0, last};
  }
  Row(const Row&) = delete;

  size_t size() const { return values_.size(); }

  // Nothing to draw: takes the highest.
  bool is_certain() const { return draw_.temperature == 0.0 || !std::isfinite(highest_); }

  int32_t first_highest() const {
    if (highest_ == -kInfinity) return 0;
    const auto at = static_cast<size_t>(std::find(peaks_.begin(), peaks_.end(), highest_) - peaks_.begin());
    const auto part = values_.subspan(at * block_, std::min(block_, values_.size() - at * block_));
    std::array<int32_t, kBlock> places;
    kernels_.find_within(part.data(), static_cast<int>(part.size()), highest_, highest_, places.data());
    return static_cast<int32_t>(at * block_) + places[0];
  }

  void tally(size_t begin, size_t end, Tally& tally) const {
    std::fill_n(tally.mass.begin(), num_buckets_, 0);
    std::fill_n(tally.count.begin(), cuts_top_k() ? num_buckets_ : 0, 0);
    kernels_.tally(values_.data() + begin, static_cast<int64_t>(end - begin), scale_, tally.mass.data(),
                   cuts_top_k() ? tally.count.data() : nullptr);
  }
  void add(Tally& tally, const Tally& other) const {
    for (size_t b = 0; b < static_cast<size_t>(num_buckets_); ++b) {
      tally.mass[b] += other.mass[b];
      if (cuts_top_k()) tally.count[b] += other.count[b];
    }
  }

  // `tally` is of the whole row.
  int32_t pick(const Tally& tally) {
    const uint64_t total =
        cuts_top_k() ? mass_of_first(tally, static_cast<uint64_t>(draw_.top_k))
                     : std::accumulate(tally.mass.begin(), tally.mass.begin() + num_buckets_, uint64_t{0});
    uint64_t kept = total;
    if (draw_.top_p < 1.0) {
      const double least = std::ceil(draw_.top_p * static_cast<double>(total));
      const uint64_t needed = std::clamp(static_cast<uint64_t>(least), uint64_t{1}, total);
      kept = std::min(kept, prefix(tally, needed).mass);
    }
    if (draw_.min_p > 0.0) kept = std::min(kept, mass_of_min_p());
    const auto target = static_cast<uint64_t>(draw_.uniform * static_cast<double>(kept));
    return prefix(tally, std::min(target, kept - 1) + 1).last;
  }

 private:
  struct Entry {
    uint64_t key;  // ascending in the order of the rule
    uint64_t weight;
    int32_t token() const { return static_cast<int32_t>(key & 0xffffffffu); }
    bool operator<(const Entry& other) const { return key < other.key; }
  };
  // The fewest first tokens with enough weight: their total weight, and the last of them.
  struct Prefix {
    uint64_t mass;
    int32_t last;
  };
  using Entries = std::vector<Entry>;

  bool cuts_top_k() const { return draw_.top_k >= 1.0 && draw_.top_k < static_cast<double>(values_.size()); }

  // Keeps only elements from a logit on, if those below cannot matter; returns that logit.
  float narrow() {
    float low = -kInfinity;
    if (cuts_top_k() && draw_.top_k <= static_cast<double>(peaks_.size())) {
      // Each of the k highest blocks has an element as high as the k-th.
      std::vector<float> peaks = peaks_;
      const auto kth = peaks.begin() + static_cast<std::ptrdiff_t>(draw_.top_k) - 1;
      std::nth_element(peaks.begin(), kth, peaks.end(), std::greater<>());
      low = *kth;
    }
    if (draw_.top_p >= 1.0) low = std::max(low, lowest_of_min_p());
    if (low == -kInfinity) return low;
    each_within(low, kInfinity, [&](const float* values, const uint32_t* places, int count) {
      few_values_.insert(few_values_.end(), values, values + count);
      few_places_.insert(few_places_.end(), places, places + count);
    });
    values_ = few_values_;
    return low;
  }

  // Nothing below it has the weight that min-p requires.
  float lowest_of_min_p() const {
    return draw_.min_p > 0.0 ? below(highest_ + std::log2(draw_.min_p) * (1 + kMargin) / factor_ - kMargin)
                             : -kInfinity;
  }
  static float below(double v) { return std::nextafter(static_cast<float>(v), -kInfinity); }
  static float above(double v) { return std::nextafter(static_cast<float>(v), kInfinity); }

  uint64_t mass_of_min_p() const {
    const auto least = static_cast<uint64_t>(std::ceil(draw_.min_p * std::ldexp(1.0, bits_)));
    uint64_t mass = 0;
    std::array<uint64_t, kBlock> weights;
    std::array<int32_t, kBlock> buckets;
    each_within(lowest_of_min_p(), kInfinity, [&](const float* values, const uint32_t*, int count) {
      kernels_.weigh(values, count, scale_, weights.data(), buckets.data());
      for (size_t c = 0; c < static_cast<size_t>(count); ++c) mass += weights[c] >= least ? weights[c] : 0;
    });
    return mass;
  }

  uint64_t mass_of_first(const Tally& tally, uint64_t rank) {
    uint64_t mass = 0;
    for (int b = 0; b < num_buckets_; ++b) {
      const uint64_t count = tally.count[static_cast<size_t>(b)];
      if (count < rank) {
        rank -= count;
        mass += tally.mass[static_cast<size_t>(b)];
        continue;
      }
      Entries& entries = collect(b);
      const auto end = entries.begin() + static_cast<std::ptrdiff_t>(std::min(rank, entries.size()));
      if (end != entries.end()) std::nth_element(entries.begin(), end, entries.end());
      return mass + sum(entries.begin(), end);
    }
    return mass;
  }

  Prefix prefix(const Tally& tally, uint64_t needed) {
    uint64_t mass = 0;
    int b = 0;
    for (; b + 1 < num_buckets_ && mass + tally.mass[static_cast<size_t>(b)] < needed; ++b)
      mass += tally.mass[static_cast<size_t>(b)];
    Entries& entries = collect(b);
    auto begin = entries.begin(), end = entries.end();
    while (end - begin > 32) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end);
      const uint64_t half = sum(begin, middle);
      if (mass + half >= needed) {
        end = middle;
      } else {
        mass += half;
        begin = middle;
      }
    }
    std::sort(begin, end);
    for (; begin != end; ++begin) {
      mass += begin->weight;
      if (mass >= needed) break;
    }
    return {mass, begin->token()};
  }

  static uint64_t sum(Entries::const_iterator begin, Entries::const_iterator end) {
    uint64_t sum = 0;
    for (; begin != end; ++begin) sum += begin->weight;
    return sum;
  }

  // The elements of a bucket, in any order.
  Entries& collect(int bucket) {
    if (bucket == collected_) return entries_;
    collected_ = bucket;
    entries_.clear();
    // Between these two logits, by a margin that no rounding reaches.
    float low = -kInfinity, high = kInfinity;
    if (scale_.per_bucket > 0.0) {
      const double width = 1.0 / (scale_.per_bucket * factor_);
      high = above(highest_ - width * bucket * (1 - kMargin));
      if (bucket + 1 < num_buckets_) low = below(highest_ - width * (bucket + 1) * (1 + kMargin));
    }
    std::array<uint64_t, kBlock> weights;
    std::array<int32_t, kBlock> buckets;
    each_within(low, high, [&](const float* values, const uint32_t* places, int count) {
      kernels_.weigh(values, count, scale_, weights.data(), buckets.data());
      for (size_t c = 0; c < static_cast<size_t>(count); ++c) {
        if (buckets[c] != bucket) continue;
        entries_.push_back({static_cast<uint64_t>(~ordered(values[c])) << 32 | places[c], weights[c]});
      }
    });
    return entries_;
  }

  // visit(values, tokens, count) of the elements within [low, high], block by block.
  template <class Visit>
  void each_within(float low, float high, const Visit& visit) const {
    const bool is_whole = few_places_.empty();
    std::array<int32_t, kBlock> places;
    std::array<uint32_t, kBlock> tokens;
    std::array<float, kBlock> values;
    for (size_t i = 0; i < values_.size(); i += block_) {
      if (is_whole && (peaks_[i / block_] < low || lows_[i / block_] > high)) continue;
      const float* part = values_.data() + i;
      const int n = static_cast<int>(std::min(block_, values_.size() - i));
      const int found = kernels_.find_within(part, n, low, high, places.data());
      if (found == 0) continue;
      for (size_t c = 0; c < static_cast<size_t>(found); ++c) {
        const auto place = static_cast<size_t>(places[c]);
        values[c] = part[place];
        tokens[c] = is_whole ? static_cast<uint32_t>(i + place) : few_places_[i + place];
      }
      visit(values.data(), tokens.data(), found);
    }
  }

  static constexpr double kMargin = 1e-9;  // relative: roundings are of 1e-14

  const SamplingKernels& kernels_;
  const Draw& draw_;
  std::span<const float> values_;  // the row, or few_values_
  size_t block_ = kBlock;
  std::vector<float> peaks_, lows_;  // the highest and lowest of each block of the row
  std::vector<float> few_values_;
  std::vector<uint32_t> few_places_;
  int bits_ = 0;
  float highest_ = -kInfinity;
  double factor_ = 0;
  WeightScale scale_ = {};
  int num_buckets_ = 1;
  int collected_ = -1;
  Entries entries_;
};

int32_t pick_alone(Row& row, Tally& tally) {
  if (row.is_certain()) return row.first_highest();
  row.tally(0, row.size(), tally);
  return row.pick(tally);
}

// Fewer rows than threads: the expensive part, the tally of a long row, is shared out in segments. Sums are
// exact, so the result equals pick_alone's.
void pick_shared(ThreadPool& pool, std::span<std::optional<Row>> rows, int32_t* tokens) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  int64_t num_segments = 1;
  for (const auto& row : rows)
    num_segments = std::max(num_segments, static_cast<int64_t>(row->size() / kLeastShared));
  num_segments = std::min<int64_t>(num_segments, kSegmentsPerThread * pool.num_threads());
  const auto is_shared = [&](const Row& row) { return !row.is_certain() && row.size() > kLeastShared; };
  const auto tallies = std::make_unique_for_overwrite<Tally[]>(static_cast<size_t>(num_rows * num_segments));
  if (std::any_of(rows.begin(), rows.end(), [&](const auto& row) { return is_shared(*row); })) {
    pool.parallel_for(num_rows * num_segments, [&](int64_t chunk, int) {
      const Row& row = *rows[static_cast<size_t>(chunk / num_segments)];
      const auto segment = static_cast<size_t>(chunk % num_segments), of = static_cast<size_t>(num_segments);
      if (is_shared(row))
        row.tally(row.size() * segment / of, row.size() * (segment + 1) / of,
                  tallies[static_cast<size_t>(chunk)]);
    });
  }
  pool.parallel_for(num_rows, [&](int64_t r, int) {
    Row& row = *rows[static_cast<size_t>(r)];
    Tally* own = &tallies[static_cast<size_t>(r * num_segments)];
    if (!is_shared(row)) {
      tokens[r] = pick_alone(row, *own);
      return;
    }
    for (int64_t s = 1; s < num_segments; ++s) row.add(own[0], own[s]);
    tokens[r] = row.pick(own[0]);
  });
}

float highest_of(const SamplingKernels& kernels, const float* x, size_t n) {
  float lowest = 0, highest = 0;
  kernels.extremes(x, static_cast<int64_t>(n), &lowest, &highest);
  return highest;
}

// The `count` largest of a row, descending, ties: the lower index first. A block without an element larger than
// the current least costs one comparison per element.
std::vector<LogProbability> largest(const SamplingKernels& kernels, std::span<const float> logits,
                                    size_t count) {
  std::vector<LogProbability> best;
  if (count == 0) return best;
  const auto is_greater = [](const LogProbability& a, const LogProbability& b) { return a.value > b.value; };
  for (size_t i = 0; i < logits.size(); i += kBlock) {
    const size_t end = std::min(logits.size(), i + kBlock);
    if (best.size() == count) {
      if (!(highest_of(kernels, logits.data() + i, end - i) > best.back().value)) continue;
    }
    for (size_t at = i; at < end; ++at) {
      const LogProbability each{static_cast<int32_t>(at), logits[at]};
      if (std::isnan(each.value) || (best.size() == count && each.value <= best.back().value)) continue;
      if (best.size() == count) best.pop_back();
      best.insert(std::upper_bound(best.begin(), best.end(), each, is_greater), each);
    }
  }
  return best;
}

}  // namespace

void pick_tokens(const kernels::KernelTable& table, ThreadPool& pool, float* logits, int64_t vocabulary,
                 std::span<const Draw> draws, std::span<const TokenRules* const> rules, int32_t* tokens) {
  const SamplingKernels& kernels = *table.sampling;
  const auto num_rows = static_cast<int64_t>(draws.size());
  const auto row_of = [&](int64_t r) {
    return std::span(logits + r * vocabulary, static_cast<size_t>(vocabulary));
  };
  std::vector<TokenRules::Changes> changes(draws.size());
  const auto apply = [&](int64_t r) {
    const TokenRules* own = rules[static_cast<size_t>(r)];
    if (own != nullptr) own->apply(row_of(r), changes[static_cast<size_t>(r)]);
  };
  const auto undo = [&](int64_t r) { TokenRules::undo(row_of(r), changes[static_cast<size_t>(r)]); };

  const int num_threads = pool.num_threads();
  if (num_rows<num_threads&& static_cast<size_t>(vocabulary)> kLeastShared) {
    std::vector<std::optional<Row>> rows(draws.size());
    pool.parallel_for(num_rows, [&](int64_t r, int) {
      apply(r);
      rows[static_cast<size_t>(r)].emplace(kernels, row_of(r), draws[static_cast<size_t>(r)]);
    });
    pick_shared(pool, rows, tokens);
    for (int64_t r = 0; r < num_rows; ++r) undo(r);
    return;
  }
  const auto tallies = std::make_unique_for_overwrite<Tally[]>(static_cast<size_t>(num_threads));
  pool.parallel_for(num_rows, [&](int64_t r, int thread) {
    apply(r);
    Row row(kernels, row_of(r), draws[static_cast<size_t>(r)]);
    tokens[r] = pick_alone(row, tallies[static_cast<size_t>(thread)]);
    undo(r);
  });
}

void mask_logits(ThreadPool& pool, float* logits, int64_t vocabulary, std::span<const MaskedRow> rows) {
  const auto mask_row = [&](int64_t i, int) {
    const MaskedRow& masked = rows[static_cast<size_t>(i)];
    float* row = logits + masked.row * vocabulary;
    const auto bits_at = [&](int64_t at) { return static_cast<uint8_t>(masked.allowed[at / 32] >> at % 32); };
    int64_t at = 0;
    for (; at + 8 <= vocabulary; at += 8) mask_eight(row + at, bits_at(at));
    for (; at < vocabulary; ++at) {
      if ((bits_at(at) & 1) == 0) row[at] = -kInfinity;
    }
  };
  const auto num_rows = static_cast<int64_t>(rows.size());
  if (num_rows * vocabulary <= kLeastSharedMask) {
    for (int64_t i = 0; i < num_rows; ++i) mask_row(i, 0);
  } else {
    pool.parallel_for(num_rows, mask_row);
  }
}

void log_probabilities(const kernels::KernelTable& table, ThreadPool& pool, const float* logits,
                       int64_t vocabulary, std::span<const LogProbabilityQuery> queries,
                       std::span<std::vector<LogProbability>> answers) {
  const SamplingKernels& kernels = *table.sampling;
  pool.parallel_for(static_cast<int64_t>(queries.size()), [&](int64_t i, int) {
    const LogProbabilityQuery& query = queries[static_cast<size_t>(i)];
    const std::span row(logits + query.row * vocabulary, static_cast<size_t>(vocabulary));
    const double highest = highest_of(kernels, row.data(), row.size());
    const double total = highest + std::log(kernels.sum_exp(row.data(), vocabulary, highest));
    std::vector<LogProbability>& answer = answers[static_cast<size_t>(i)];
    answer = largest(kernels, row, static_cast<size_t>(query.num_top));
    answer.insert(answer.begin(), {query.token, row[static_cast<size_t>(query.token)]});
    for (LogProbability& each : answer)
      each.value = std::isfinite(highest) ? each.value - total : -static_cast<double>(kInfinity);
  });
}

}  // namespace twofold
