// A learned indexer's keys, scores and lists on the SIMT machine against scalar references in double precision.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "indexer_layer.h"
#include "watched_run.h"

using namespace twofold::cuda;
using test::WatchedRun;

namespace {

struct IndexCase {
  int heads, dim, rotary;
  bool neighbours;
  int most;
  bool coarse = false;  // few distinct scores, so that equal ones are chosen among
  int block = 0;        // above 0: positions of a block, which are chosen by head
  int local = 0;
  bool last = false;
  bool pooled = false;  // blocks are pools

  int lists() const { return block > 0 && !pooled ? heads : 1; }
};

constexpr int kPage = 8, kMaxPages = 90;

double value(uint16_t bits) { return double(test::float_of_bf16(bits)); }

void near(double ours, double expected, const char* what) {
  if (!(std::abs(ours - expected) <= std::abs(expected) / 100 + 1e-3))
    test::fail(what, 0, std::to_string(ours) + " instead of " + std::to_string(expected));
}

// A row whose first or last elements are rotated.
std::vector<double> rotated(const std::vector<double>& row, const IndexCase& c, const float* cos,
                            const float* sin) {
  std::vector<double> turned = row;
  const int half = c.rotary / 2, begin = c.last ? c.dim - c.rotary : 0;
  for (int i = 0; i < half; ++i) {
    const double a = row[size_t(begin + (c.neighbours ? 2 * i : i))];
    const double b = row[size_t(begin + (c.neighbours ? 2 * i + 1 : half + i))];
    turned[size_t(begin + i)] = a * double(cos[i]) - b * double(sin[i]);
    turned[size_t(begin + half + i)] = b * double(cos[i]) + a * double(sin[i]);
  }
  return turned;
}

std::vector<double> widened(const uint16_t* from, int n) {
  std::vector<double> row;
  for (int i = 0; i < n; ++i) row.push_back(value(from[i]));
  return row;
}

// A list of one sequence, by the kernel's own scores of its blocks, pools or positions.
std::vector<int32_t> best(const IndexCase& c, std::vector<float> scores, int length) {
  const int block = std::max(1, c.block), most = c.most / block, n = int(scores.size());
  for (int i = std::max(0, n - c.local); i < n; ++i) scores[size_t(i)] = INFINITY;
  std::vector<int32_t> order(static_cast<size_t>(n)), list;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return scores[size_t(a)] > scores[size_t(b)]; });
  order.resize(size_t(std::min(n, most)));
  std::sort(order.begin(), order.end());
  for (const int each : order) {
    for (int p = each * block; p < std::min((each + 1) * block, length); ++p) list.push_back(p);
  }
  for (int p = n * block; p < length; ++p) list.push_back(p);  // after the last whole pool
  return list;
}

// x / the root of its mean square, or, with a bias, of its variance.
std::vector<double> normed(std::vector<double> x, const std::vector<float>& norm, const float* bias) {
  const double n = double(x.size());
  const double mean = bias == nullptr ? 0.0 : std::accumulate(x.begin(), x.end(), 0.0) / n;
  double squares = 0;
  for (const double each : x) squares += (each - mean) * (each - mean);
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = (x[i] - mean) / std::sqrt(squares / n + 1e-6) * double(norm[i]) +
           (bias == nullptr ? 0.0 : double(bias[i]));
  return x;
}

void check_index(const IndexCase& c) {
  const std::vector<int32_t> lengths{1, 0, 700, 33, c.most};
  const int S = int(lengths.size()), D = c.dim, stride = D + c.heads + 3, half = c.rotary / 2;
  std::vector<int32_t> tables(size_t(S * kMaxPages));
  std::iota(tables.rbegin(), tables.rend(), 0);
  const auto slot = [&](int s, int position) {
    return int64_t(tables[size_t(s * kMaxPages + position / kPage)]) * kPage + position % kPage;
  };
  std::vector<int64_t> places;
  for (int s = 0; s < S; ++s) places.push_back(lengths[size_t(s)] > 0 ? slot(s, lengths[size_t(s)] - 1) : -1);
  auto cache = test::random_bf16(size_t(S * kMaxPages * kPage * D), 1);
  if (c.coarse) {
    for (size_t i = 0; i < cache.size(); ++i) cache[i] = i / size_t(D) % 3 == 0 ? 0x3f80 : 0;
  }
  const auto projected = test::random_bf16(size_t(S * stride), 2);
  const auto queries = test::random_bf16(size_t(S * c.heads * D), 3);
  const auto norm = test::random_floats(size_t(D), 4), bias = test::random_floats(size_t(D), 5);
  const auto cos = test::random_floats(size_t(S * half), 6), sin = test::random_floats(size_t(S * half), 7);
  test::under_schedules([&](WatchedRun& run) {
    auto* keys = run.copy("keys", cache);
    const auto* rows = run.copy("projected", projected);
    auto* turned = run.memory<uint16_t>("rotated", size_t(S * c.heads * D));
    const IndexPages pages{keys, kPage, D};
    const auto* norms = run.copy("norm", norm);
    const bool blocks = c.block > 0;
    run.check(launch_index_store(
                  {rows, stride, run.copy("queries", queries), S, c.heads, blocks ? norms : nullptr, norms,
                   blocks ? nullptr : run.copy("bias", bias), 1e-6f, run.copy("cos", cos),
                   run.copy("sin", sin), c.rotary, c.last, c.neighbours, run.copy("slot_mapping", places)},
                  pages, turned, nullptr),
              "index_store");
    for (int s = 0; s < S; ++s) {
      const float *cosine = cos.data() + s * half, *sine = sin.data() + s * half;
      for (int row = s * c.heads; row < (s + 1) * c.heads; ++row) {
        auto query = widened(queries.data() + row * D, D);
        if (blocks) query = normed(query, norm, nullptr);
        const auto expected = rotated(query, c, cosine, sine);
        for (int i = 0; i < D; ++i) near(value(turned[row * D + i]), expected[size_t(i)], "rotate");
      }
      if (places[size_t(s)] < 0) continue;
      const auto key =
          rotated(normed(widened(projected.data() + s * stride, D), norm, blocks ? nullptr : bias.data()), c,
                  cosine, sine);
      for (int i = 0; i < D; ++i) near(value(keys[places[size_t(s)] * D + i]), key[size_t(i)], "store");
    }
    const int L = c.lists(), max_length = 700;
    IndexChoice choice{turned,
                       blocks ? nullptr : rows + D,
                       stride,
                       run.copy("tables", tables),
                       run.copy("lengths", lengths),
                       S,
                       c.heads,
                       kMaxPages,
                       max_length,
                       c.most,
                       std::max(1, c.block),
                       c.local,
                       run.memory<int32_t>("positions", size_t(S * L * c.most)),
                       run.memory<int32_t>("counts", size_t(S * L)),
                       c.pooled};
    auto* scores = run.memory<float>("scores", size_t(choice.num_scores()));
    run.check(launch_index_choose(choice, pages, scores, nullptr), "index_choose");
    for (int row = 0; row < S * L; ++row) {
      const int s = row / L, length = lengths[size_t(s)];
      const float* const own = scores + row * choice.num_blocks(max_length);
      for (int b = 0; b < choice.num_blocks(length); ++b) {
        const bool by_head = blocks && !c.pooled;
        const int begin = b * choice.block, end = std::min(begin + choice.block, length);
        double expected = by_head ? -INFINITY : 0;
        for (int p = c.pooled ? end - 1 : begin; p < end; ++p) {
          for (int h = by_head ? row % L : 0; h < (by_head ? row % L + 1 : c.heads); ++h) {
            double product = 0;
            for (int i = 0; i < D; ++i)
              product += value(turned[(s * c.heads + h) * D + i]) * value(keys[slot(s, p) * D + i]);
            if (by_head)
              expected = std::max(expected, product);
            else
              expected +=
                  (blocks ? 1.0 : value(projected[size_t(s * stride + D + h)])) * std::max(product, 0.0);
          }
        }
        near(double(own[b]), expected, "score");
      }
      const auto list = best(c, {own, own + choice.num_blocks(length)}, length);
      CHECK_EQUAL(choice.counts[row], int(list.size()));
      CHECK(std::equal(list.begin(), list.end(), choice.positions + int64_t{row} * c.most));
    }
  });
}

// Keys of a step of one token at position 7, a row of padding, and a prompt's positions 5 to 17 after other ones.
void check_pools(int dim, int rotary, bool listed) {
  constexpr int kPool = 4, kTables = 3, kPrompt = 5, kEnd = 18;
  const IndexCase c{.heads = 2, .dim = dim, .rotary = rotary, .neighbours = false, .most = 1};
  std::vector<int32_t> tables{5, 3, 8, 1, 7, 2}, sequences{0, 0};
  std::vector<int64_t> positions{7, 3}, places{5 * kPage + 7, -1};
  for (int p = kPrompt; p < (listed ? kEnd : kPrompt); ++p) {
    sequences.push_back(1);
    positions.push_back(p);
    places.push_back(int64_t(tables[size_t(kTables + p / kPage)]) * kPage + p % kPage);
  }
  const int T = int(positions.size()), half = rotary / 2;
  auto cache = test::random_bf16(size_t(9 * kPage * dim), 1);
  const auto projected = test::random_bf16(size_t(T * (dim + 1)), 2);
  const auto norm = test::random_floats(size_t(dim), 4);
  const auto cos = test::random_floats(size_t(T * half), 6), sin = test::random_floats(size_t(T * half), 7);
  auto expected = cache;
  for (int t = 0; t < T; ++t) {
    if (places[size_t(t)] >= 0)
      std::copy_n(projected.begin() + t * (dim + 1), dim, expected.begin() + places[size_t(t)] * dim);
  }
  test::under_schedules([&](WatchedRun& run) {
    auto* keys = run.copy("keys", cache);
    const IndexPages pages{keys, kPage, dim};
    const auto* slots = run.copy("slot_mapping", places);
    const auto* queries = run.copy("queries", test::random_bf16(size_t(T * c.heads * dim), 3));
    const auto *cosines = run.copy("cos", cos), *sines = run.copy("sin", sin);
    run.check(launch_index_store({run.copy("projected", projected), dim + 1, queries, T, c.heads, nullptr,
                                  nullptr, nullptr, 1e-6f, cosines, sines, rotary, false, false, slots},
                                 pages, run.memory<uint16_t>("rotated", size_t(T * c.heads * dim)), nullptr),
              "index_store");
    run.check(launch_index_pool(
                  {kPool, run.copy("tables", tables), kTables,
                   listed ? run.copy("sequences", sequences) : nullptr, run.copy("positions", positions),
                   slots, T, run.copy("norm", norm), 1e-6f, cosines, sines, rotary},
                  pages, nullptr),
              "index_pool");
    for (int t = 0; t < T; ++t) {
      const int64_t place = places[size_t(t)], position = positions[size_t(t)];
      if (place < 0) continue;
      std::vector<double> key = widened(&expected[size_t(place * dim)], dim);
      if ((position + 1) % kPool == 0) {
        std::fill(key.begin(), key.end(), 0.0);
        for (int64_t p = position + 1 - kPool; p <= position; ++p) {
          const int page = tables[size_t(sequences[size_t(t)] * kTables + p / kPage)];
          const auto own = widened(&expected[size_t((page * kPage + p % kPage) * dim)], dim);
          for (int i = 0; i < dim; ++i) key[size_t(i)] += own[size_t(i)] / kPool;
        }
        key = rotated(normed(key, norm, nullptr), c, &cos[size_t(t * half)], &sin[size_t(t * half)]);
      }
      for (int i = 0; i < dim; ++i) near(value(keys[place * dim + i]), key[size_t(i)], "pool");
    }
  });
}

}  // namespace

CASE(indexers_store_keys_of_pools_as_the_scalar_one) {
  check_pools(34, 12, true);
  check_pools(10, 10, false);
}

CASE(indexers_store_score_and_choose_as_the_scalar_one) {
  check_index({.heads = 6, .dim = 32, .rotary = 16, .neighbours = false, .most = 40});
  check_index({.heads = 2, .dim = 26, .rotary = 12, .neighbours = false, .most = 60, .last = true});
  check_index({.heads = 1, .dim = 10, .rotary = 10, .neighbours = true, .most = 300});
  check_index({.heads = 19, .dim = 34, .rotary = 0, .neighbours = false, .most = 257, .coarse = true});
  check_index({.heads = 3, .dim = 32, .rotary = 8, .neighbours = false, .most = 96, .block = 32, .local = 2});
  check_index(
      {.heads = 11, .dim = 10, .rotary = 0, .neighbours = false, .most = 130, .coarse = true, .block = 130});
  check_index(
      {.heads = 2, .dim = 6, .rotary = 2, .neighbours = false, .most = 9, .coarse = true, .block = 3});
  check_index(
      {.heads = 5, .dim = 32, .rotary = 8, .neighbours = false, .most = 35, .block = 4, .pooled = true});
  check_index({.heads = 2,
               .dim = 6,
               .rotary = 2,
               .neighbours = false,
               .most = 33,
               .coarse = true,
               .block = 17,
               .pooled = true});
}
