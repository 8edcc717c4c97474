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
};

constexpr int kPage = 8, kMaxPages = 90;

double value(uint16_t bits) { return double(test::float_of_bf16(bits)); }

void near(double ours, double expected, const char* what) {
  if (!(std::abs(ours - expected) <= std::abs(expected) / 100 + 1e-3))
    test::fail(what, 0, std::to_string(ours) + " instead of " + std::to_string(expected));
}

// A row whose first elements are rotated.
std::vector<double> rotated(const std::vector<double>& row, const IndexCase& c, const float* cos,
                            const float* sin) {
  std::vector<double> turned = row;
  const int half = c.rotary / 2;
  for (int i = 0; i < half; ++i) {
    const double a = row[size_t(c.neighbours ? 2 * i : i)];
    const double b = row[size_t(c.neighbours ? 2 * i + 1 : half + i)];
    turned[size_t(i)] = a * double(cos[i]) - b * double(sin[i]);
    turned[size_t(half + i)] = b * double(cos[i]) + a * double(sin[i]);
  }
  return turned;
}

std::vector<double> widened(const uint16_t* from, int n) {
  std::vector<double> row;
  for (int i = 0; i < n; ++i) row.push_back(value(from[i]));
  return row;
}

// The list of one sequence, by the kernel's own scores.
std::vector<int32_t> best(const float* scores, int length, int most) {
  std::vector<int32_t> order(static_cast<size_t>(length));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  order.resize(size_t(std::min(length, most)));
  std::sort(order.begin(), order.end());
  return order;
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
    run.check(
        launch_index_store({rows, stride, run.copy("queries", queries), S, c.heads, run.copy("norm", norm),
                            run.copy("bias", bias), 1e-6f, run.copy("cos", cos), run.copy("sin", sin),
                            c.rotary, c.neighbours, run.copy("slot_mapping", places)},
                           pages, turned, nullptr),
        "index_store");
    for (int s = 0; s < S; ++s) {
      const float *cosine = cos.data() + s * half, *sine = sin.data() + s * half;
      for (int row = s * c.heads; row < (s + 1) * c.heads; ++row) {
        const auto expected = rotated(widened(queries.data() + row * D, D), c, cosine, sine);
        for (int i = 0; i < D; ++i) near(value(turned[row * D + i]), expected[size_t(i)], "rotate");
      }
      if (places[size_t(s)] < 0) continue;
      auto key = widened(projected.data() + s * stride, D);
      const double mean = std::accumulate(key.begin(), key.end(), 0.0) / D;
      double squares = 0;
      for (const double x : key) squares += (x - mean) * (x - mean);
      for (int i = 0; i < D; ++i)
        key[size_t(i)] = (key[size_t(i)] - mean) / std::sqrt(squares / D + 1e-6) * double(norm[size_t(i)]) +
                         double(bias[size_t(i)]);
      key = rotated(key, c, cosine, sine);
      for (int i = 0; i < D; ++i) near(value(keys[places[size_t(s)] * D + i]), key[size_t(i)], "store");
    }
    const int max_length = 700;
    auto* scores = run.memory<float>("scores", size_t(S * max_length));
    auto* positions = run.memory<int32_t>("positions", size_t(S * c.most));
    auto* counts = run.memory<int32_t>("counts", size_t(S));
    run.check(launch_index_choose(
                  {turned, rows + D, stride, run.copy("tables", tables), run.copy("lengths", lengths), S,
                   c.heads, kMaxPages, max_length, c.most, positions, counts},
                  pages, scores, nullptr),
              "index_choose");
    for (int s = 0; s < S; ++s) {
      const int length = lengths[size_t(s)];
      for (int p = 0; p < length; ++p) {
        double expected = 0;
        for (int h = 0; h < c.heads; ++h) {
          double product = 0;
          for (int i = 0; i < D; ++i)
            product += value(turned[(s * c.heads + h) * D + i]) * value(keys[slot(s, p) * D + i]);
          expected += value(projected[size_t(s * stride + D + h)]) * std::max(product, 0.0);
        }
        near(double(scores[s * max_length + p]), expected, "score");
      }
      const auto list = best(scores + s * max_length, length, c.most);
      CHECK_EQUAL(counts[s], int(list.size()));
      CHECK(std::equal(list.begin(), list.end(), positions + s * c.most));
    }
  });
}

}  // namespace

CASE(indexers_store_score_and_choose_as_the_scalar_one) {
  check_index({.heads = 6, .dim = 32, .rotary = 16, .neighbours = false, .most = 40});
  check_index({.heads = 1, .dim = 10, .rotary = 10, .neighbours = true, .most = 300});
  check_index({.heads = 19, .dim = 34, .rotary = 0, .neighbours = false, .most = 257, .coarse = true});
}
