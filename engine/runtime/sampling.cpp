#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace twofold {
namespace {

using kernels::SamplingKernels;
using kernels::WeightScale;

constexpr int kBuckets = 1024;
constexpr int kBlock = 512;              // elements whose weights lie in the first-level cache
constexpr int64_t kLeastSegment = 8192;  // below, sharing a row costs more than it gives
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What lies in each bucket of a part of a row. Neighbours alternate between two rows of sums, so that equal
// ones need not wait for each other.
struct Tally {
  uint64_t mass[2][kBuckets] = {};
  uint32_t count[2][kBuckets] = {};
  uint64_t of_min_p = 0;  // sum of weights that min-p leaves

  void add(const Tally& other) {
    for (int half = 0; half < 2; ++half) {
      for (int b = 0; b < kBuckets; ++b) {
        mass[0][b] += other.mass[half][b];
        count[0][b] += other.count[half][b];
      }
    }
    of_min_p += other.of_min_p;
  }
  void fold() {
    for (int b = 0; b < kBuckets; ++b) {
      mass[0][b] += std::exchange(mass[1][b], 0);
      count[0][b] += std::exchange(count[1][b], 0);
    }
  }
};

// Floats as whole numbers in the same order; -0 and 0 are one.
uint32_t ordered(float v) {
  const auto bits = std::bit_cast<uint32_t>(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
float unordered(uint32_t key) { return std::bit_cast<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

struct Extremes {
  float lowest = kInfinity, highest = -kInfinity;

  void add(const Extremes& other) {
    lowest = std::min(lowest, other.lowest);
    highest = std::max(highest, other.highest);
  }
};

class Row {
 public:
  Row(const SamplingKernels& kernels, std::span<const float> logits, const Draw& draw, Extremes extremes)
      : kernels_(kernels), logits_(logits), draw_(draw), highest_(extremes.highest) {
    const int bits = std::min(51, 63 - static_cast<int>(std::bit_width(logits.size())));
    const double inverse = std::min(1.0 / draw.temperature, 1e300);
    const double all = std::log(2.0) * (bits + 1);  // beyond this every weight is 0
    double range = (static_cast<double>(highest_) - extremes.lowest) * inverse;
    if (!(range < all)) range = all;
    scale_ = {highest_, inverse, std::ldexp(1.0, bits), range > 1e-9 ? (kBuckets - 1) / range : 0.0,
              kBuckets - 1.0};
  }

  // There is nothing to draw: the highest is taken.
  bool is_certain() const { return draw_.temperature == 0.0 || !std::isfinite(highest_); }

  int32_t first_highest() const {
    std::vector<int32_t> places(kBlock);
    for (size_t i = 0; i < logits_.size(); i += kBlock) {
      const auto part = logits_.subspan(i, std::min<size_t>(kBlock, logits_.size() - i));
      if (kernels_.find_within(part.data(), static_cast<int>(part.size()), highest_, highest_, places.data()))
        return static_cast<int32_t>(i) + places[0];
    }
    return 0;
  }

  void tally(int64_t begin, int64_t end, Tally& tally) const {
    uint64_t weights[kBlock];
    int32_t buckets[kBlock];
    const uint64_t least = least_of_min_p();
    for (int64_t i = begin; i < end; i += kBlock) {
      const int n = static_cast<int>(std::min<int64_t>(kBlock, end - i));
      kernels_.weigh(logits_.data() + i, n, scale_, weights, buckets);
      for (int c = 0; c < n; ++c) tally.mass[c & 1][buckets[c]] += weights[c];
      if (cuts_top_k()) {
        for (int c = 0; c < n; ++c) ++tally.count[c & 1][buckets[c]];
      }
      if (least != 0) {
        for (int c = 0; c < n; ++c) tally.of_min_p += weights[c] >= least ? weights[c] : 0;
      }
    }
  }

  // `tally` is of the whole row, folded.
  int32_t pick(const Tally& tally) {
    uint64_t total = 0;
    if (cuts_top_k()) {
      total = mass_of_first(tally, static_cast<uint64_t>(draw_.top_k));
    } else {
      for (const uint64_t mass : tally.mass[0]) total += mass;
    }
    uint64_t kept = total;
    if (draw_.top_p < 1.0) {
      const double least = std::ceil(draw_.top_p * static_cast<double>(total));
      const uint64_t needed = std::clamp(static_cast<uint64_t>(least), uint64_t{1}, total);
      kept = std::min(kept, prefix(tally, needed).mass);
    }
    if (draw_.min_p > 0.0) kept = std::min(kept, tally.of_min_p);
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
  // The fewest first tokens that weigh enough: what they weigh, and the last of them.
  struct Prefix {
    uint64_t mass;
    int32_t last;
  };
  using Entries = std::vector<Entry>;

  bool cuts_top_k() const { return draw_.top_k >= 1.0 && draw_.top_k < static_cast<double>(logits_.size()); }
  uint64_t least_of_min_p() const {
    return draw_.min_p > 0.0 ? static_cast<uint64_t>(std::ceil(draw_.min_p * scale_.one)) : 0;
  }

  uint64_t mass_of_first(const Tally& tally, uint64_t rank) {
    uint64_t mass = 0;
    for (int b = 0; b < kBuckets; ++b) {
      const uint64_t count = tally.count[0][b];
      if (count < rank) {
        rank -= count;
        mass += tally.mass[0][b];
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
    while (b + 1 < kBuckets && mass + tally.mass[0][b] < needed) mass += tally.mass[0][b++];
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
    // Buckets never fall as logits fall: the bucket is what lies within two logits, found by bisection.
    const uint32_t floor = ordered(-kInfinity), ceiling = ordered(highest_);
    const float low = unordered(first_where(floor, ceiling, [&](int b) { return b <= bucket; }));
    const uint32_t beyond = first_where(floor, ceiling, [&](int b) { return b < bucket; });
    const bool has_all_above = bucket_of(unordered(beyond)) >= bucket;  // no bucket before it
    const float high = has_all_above ? highest_ : unordered(beyond - 1);
    int32_t places[kBlock];
    float values[kBlock];
    uint64_t weights[kBlock];
    int32_t buckets[kBlock];
    for (size_t i = 0; i < logits_.size(); i += kBlock) {
      const float* part = logits_.data() + i;
      const int n = static_cast<int>(std::min<size_t>(kBlock, logits_.size() - i));
      const int found = kernels_.find_within(part, n, low, high, places);
      if (found == 0) continue;
      for (int c = 0; c < found; ++c) values[c] = part[places[c]];
      kernels_.weigh(values, found, scale_, weights, buckets);
      for (int c = 0; c < found; ++c) {
        const uint64_t key = static_cast<uint64_t>(~ordered(values[c])) << 32;
        entries_.push_back({key | (i + static_cast<uint64_t>(places[c])), weights[c]});
      }
    }
    return entries_;
  }

  int bucket_of(float logit) const {
    uint64_t weight;
    int32_t bucket;
    kernels_.weigh(&logit, 1, scale_, &weight, &bucket);
    return bucket;
  }

  // The least key in [from, to] whose bucket fits; `to` if none does. What fits stays fitting above.
  template <class Fits>
  uint32_t first_where(uint32_t from, uint32_t to, const Fits& fits) const {
    while (from < to) {
      const uint32_t middle = from + (to - from) / 2;
      if (fits(bucket_of(unordered(middle)))) {
        to = middle;
      } else {
        from = middle + 1;
      }
    }
    return to;
  }

  const SamplingKernels& kernels_;
  std::span<const float> logits_;
  const Draw& draw_;
  float highest_;
  WeightScale scale_;
  int collected_ = -1;
  Entries entries_;
};

Extremes extremes_of(const SamplingKernels& kernels, const float* x, int64_t n) {
  Extremes found;
  kernels.extremes(x, n, &found.lowest, &found.highest);
  return found;
}

int32_t pick_alone(const SamplingKernels& kernels, std::span<const float> logits, const Draw& draw,
                   Tally& tally) {
  const auto size = static_cast<int64_t>(logits.size());
  Row row(kernels, logits, draw, extremes_of(kernels, logits.data(), size));
  if (row.is_certain()) return row.first_highest();
  tally = {};
  row.tally(0, size, tally);
  tally.fold();
  return row.pick(tally);
}

// Fewer rows than threads: each is shared out in segments. Sums are exact, so this gives what pick_alone
// does.
void pick_shared(const SamplingKernels& kernels, ThreadTeam& team, const float* logits, int64_t vocabulary,
                 int64_t num_segments, std::span<const Draw> draws, int32_t* tokens) {
  const auto num_rows = static_cast<int64_t>(draws.size());
  const auto begin_of = [&](int64_t segment) { return vocabulary * segment / num_segments; };
  std::vector<Extremes> extremes(static_cast<size_t>(num_rows * num_segments));
  team.parallel_for(num_rows * num_segments, [&](int64_t chunk, int) {
    const int64_t segment = chunk % num_segments, begin = begin_of(segment);
    extremes[static_cast<size_t>(chunk)] = extremes_of(
        kernels, logits + chunk / num_segments * vocabulary + begin, begin_of(segment + 1) - begin);
  });
  std::vector<Row> rows;
  for (int64_t r = 0; r < num_rows; ++r) {
    Extremes of_row;
    for (int64_t s = 0; s < num_segments; ++s)
      of_row.add(extremes[static_cast<size_t>(r * num_segments + s)]);
    rows.emplace_back(kernels, std::span(logits + r * vocabulary, static_cast<size_t>(vocabulary)),
                      draws[static_cast<size_t>(r)], of_row);
  }
  std::vector<Tally> tallies(static_cast<size_t>(num_rows * num_segments));
  team.parallel_for(num_rows * num_segments, [&](int64_t chunk, int) {
    const Row& row = rows[static_cast<size_t>(chunk / num_segments)];
    const int64_t segment = chunk % num_segments;
    if (!row.is_certain())
      row.tally(begin_of(segment), begin_of(segment + 1), tallies[static_cast<size_t>(chunk)]);
  });
  team.parallel_for(num_rows, [&](int64_t r, int) {
    Row& row = rows[static_cast<size_t>(r)];
    if (row.is_certain()) {
      tokens[r] = row.first_highest();
      return;
    }
    Tally& whole = tallies[static_cast<size_t>(r * num_segments)];
    whole.fold();
    for (int64_t s = 1; s < num_segments; ++s) whole.add(tallies[static_cast<size_t>(r * num_segments + s)]);
    tokens[r] = row.pick(whole);
  });
}

// The `count` largest of a row, descending, of equals the lower place first. Blocks that hold nothing larger
// than the least of those found cost one comparison an element.
std::vector<LogProbability> largest(const SamplingKernels& kernels, std::span<const float> logits,
                                    size_t count) {
  std::vector<LogProbability> best;
  if (count == 0) return best;
  const auto falls = [](const LogProbability& a, const LogProbability& b) { return a.value > b.value; };
  for (size_t i = 0; i < logits.size(); i += kBlock) {
    const size_t end = std::min(logits.size(), i + kBlock);
    if (best.size() == count) {
      const Extremes block = extremes_of(kernels, logits.data() + i, static_cast<int64_t>(end - i));
      if (!(block.highest > best.back().value)) continue;
    }
    for (size_t at = i; at < end; ++at) {
      const LogProbability each{static_cast<int32_t>(at), logits[at]};
      if (std::isnan(each.value) || (best.size() == count && each.value <= best.back().value)) continue;
      if (best.size() == count) best.pop_back();
      best.insert(std::upper_bound(best.begin(), best.end(), each, falls), each);
    }
  }
  return best;
}

}  // namespace

void pick_tokens(const kernels::KernelTable& table, ThreadTeam& team, float* logits, int64_t vocabulary,
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

  const int num_threads = team.num_threads();
  const int64_t shares = num_rows == 0 ? 0 : (num_threads + num_rows - 1) / num_rows;
  const int64_t num_segments = std::min(shares, vocabulary / kLeastSegment);
  if (num_segments > 1) {
    for (int64_t r = 0; r < num_rows; ++r) apply(r);
    pick_shared(kernels, team, logits, vocabulary, num_segments, draws, tokens);
    for (int64_t r = 0; r < num_rows; ++r) undo(r);
    return;
  }
  std::vector<Tally> tallies(static_cast<size_t>(num_threads));
  team.parallel_for(num_rows, [&](int64_t r, int thread) {
    apply(r);
    tokens[r] =
        pick_alone(kernels, row_of(r), draws[static_cast<size_t>(r)], tallies[static_cast<size_t>(thread)]);
    undo(r);
  });
}

void log_probabilities(const kernels::KernelTable& table, ThreadTeam& team, const float* logits,
                       int64_t vocabulary, std::span<const LogProbabilityQuery> queries,
                       std::span<std::vector<LogProbability>> answers) {
  const SamplingKernels& kernels = *table.sampling;
  team.parallel_for(static_cast<int64_t>(queries.size()), [&](int64_t i, int) {
    const LogProbabilityQuery& query = queries[static_cast<size_t>(i)];
    const std::span row(logits + query.row * vocabulary, static_cast<size_t>(vocabulary));
    const double highest = extremes_of(kernels, row.data(), vocabulary).highest;
    const double total = highest + std::log(kernels.sum_exp(row.data(), vocabulary, highest));
    std::vector<LogProbability>& answer = answers[static_cast<size_t>(i)];
    answer = largest(kernels, row, static_cast<size_t>(query.num_top));
    answer.insert(answer.begin(), {query.token, row[static_cast<size_t>(query.token)]});
    for (LogProbability& each : answer)
      each.value = std::isfinite(highest) ? each.value - total : -static_cast<double>(kInfinity);
  });
}

}  // namespace twofold
