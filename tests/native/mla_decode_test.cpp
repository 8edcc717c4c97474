// The latent attention kernels' blocks, played thread by thread on the CPU between the barriers.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "mla_lanes.h"

using namespace twofold::cuda;

namespace {

using Usual = MlaTile<kMlaUsualLatent>;
using Wide = MlaTile<kMlaMaxLatent>;

struct Case {
  int heads, latent, rope, length, page_size;
  float sink = -INFINITY;
};

std::vector<uint16_t> random_bf16(size_t count, uint32_t seed, float size = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = bf16_of_float(normal(random));
  return values;
}

// What the split and the join kernel leave for one sequence: [heads][latent].
template <class Tile>
std::vector<float> play(const Case& c, const std::vector<uint16_t>& cache, const std::vector<int32_t>& table,
                        const std::vector<uint16_t>& queries, float scale) {
  const int cached = c.latent + c.rope, splits = num_splits(c.length) + 1;  // the last has nothing to do
  std::vector<float> workspace(size_t(c.heads * splits * (c.latent + 2)), std::nanf(""));
  std::vector<uint32_t> memory(size_t(Tile::shared_bytes(cached) / 4),
                               0x7fc07fc0u);  // NaN, whatever is read of it
  for (int split = 0; split < splits; ++split) {
    const SplitRange range = split_range(split, c.length, 0);
    if (range.begin >= range.end) continue;
    for (int block = 0; block < Tile::head_blocks(c.heads); ++block) {
      const int head = block * Tile::kHeads;
      const Tile tile(memory.data(), cached, c.latent, std::min(Tile::kHeads, c.heads - head));
      std::vector<typename Tile::Sums> sums(kMlaThreads);
      const auto all = [](auto body) {
        for (int thread = 0; thread < kMlaThreads; ++thread) body(thread);
      };
      all([&](int t) { mla_begin(tile, t, queries.data() + head * cached, scale); });
      for (int first = range.begin; first < range.end; first += Tile::kChunk) {
        const int count = std::min(Tile::kChunk, range.end - first);
        const auto row_of = [&](int i) {
          const int position = first + i;
          const int slot = table[size_t(position / c.page_size)] * c.page_size + position % c.page_size;
          return reinterpret_cast<const uint32_t*>(cache.data() + size_t(slot) * size_t(cached));
        };
        all([&](int t) { mla_load(tile, t, count, row_of); });
        all([&](int t) { mla_score(tile, t, count); });
        all([&](int t) { mla_largest(tile, t, count); });
        all([&](int t) { mla_weigh(tile, t, count); });
        all([&](int t) { mla_sum(tile, t, count, sums[size_t(t)]); });
      }
      all([&](int t) { mla_leave(tile, t, sums[size_t(t)], workspace.data(), head, split, splits); });
    }
  }
  std::vector<float> out(size_t(c.heads * c.latent));
  for (int head = 0; head < c.heads; ++head) {
    for (int column = 0; column < c.latent; ++column)
      out[size_t(head * c.latent + column)] =
          mla_join(workspace.data(), head, c.length, 0, splits, c.latent, column, c.sink);
  }
  return out;
}

void check_case(const Case& c) {
  const int cached = c.latent + c.rope, pages = (c.length + c.page_size - 1) / c.page_size;
  const float scale = 0.2f;
  std::vector<int32_t> table(size_t(std::max(pages, 1)));
  std::iota(table.rbegin(), table.rend(), 2);  // in reverse, behind two pages of others
  const auto cache = random_bf16(size_t((pages + 2) * c.page_size * cached), 5);
  const auto queries = random_bf16(size_t(c.heads * cached), 6);
  const auto run = c.latent <= kMlaUsualLatent ? play<Usual> : play<Wide>;
  const std::vector<float> out = run(c, cache, table, queries, scale);
  for (int head = 0; head < c.heads; ++head) {
    std::vector<double> weights(static_cast<size_t>(c.length)), sums(static_cast<size_t>(c.latent), 0.0);
    double total = std::exp(double(c.sink));
    const auto row = [&](int position) {
      const int slot = table[size_t(position / c.page_size)] * c.page_size + position % c.page_size;
      return cache.data() + size_t(slot) * size_t(cached);
    };
    for (int i = 0; i < c.length; ++i) {
      double score = 0;
      for (int d = 0; d < cached; ++d)
        score += double(bf16_at(queries.data() + head * cached, d)) * bf16_at(row(i), d);
      total += weights[size_t(i)] = std::exp(score * scale);
    }
    for (int i = 0; i < c.length; ++i) {
      for (int d = 0; d < c.latent; ++d) sums[size_t(d)] += weights[size_t(i)] / total * bf16_at(row(i), d);
    }
    for (int d = 0; d < c.latent; ++d)
      CHECK(std::abs(out[size_t(head * c.latent + d)] - sums[size_t(d)]) < 1e-4);
  }
}

}  // namespace

CASE(mla_attends_to_each_position_once) {
  for (const Case& c : {Case{16, 512, 64, 600, 16},
                        {5, 24, 8, 33, 4},
                        {1, 2, 2, 1, 1},
                        {17, 130, 6, 257, 16},
                        {40, 64, 32, 256, 64},
                        {7, 66, 6, 300, 8, 1.5f},
                        {9, 514, 6, 40, 8, 1.5f},
                        {8, 1024, 64, 258, 16},
                        {3, 512, 64, 31, 5}})
    check_case(c);
}

CASE(mla_gives_nothing_for_a_sequence_of_padding) {
  const Case c{4, 16, 4, 0, 4};
  for (const float value : play<Usual>(c, {}, {0}, random_bf16(80, 1), 1.0f)) CHECK_EQUAL(value, 0.0f);
}

CASE(mla_shared_memory_fits_and_its_rows_lie_in_different_banks) {
  for (const int latent : {2, 64, 256, 512, 1024}) {
    for (const int rope : {2, 32, 64}) {
      const int cached = latent + rope, words = Usual::row_words(cached);
      CHECK(words * 2 >= cached && words % 2 == 1);
      const int bytes = latent <= kMlaUsualLatent ? Usual::shared_bytes(cached) : Wide::shared_bytes(cached);
      CHECK(bytes <= 99 * 1024);  // what a block may have on compute capability 8.6
    }
  }
}

CASE(mla_stores_a_normalised_latent_and_a_rotated_key) {
  constexpr int kLatent = 70, kRope = 10;
  const auto row = random_bf16(kLatent + kRope, 8, 3.0f);
  std::vector<float> norm(kLatent), cos(kRope / 2), sin(kRope / 2);
  for (int i = 0; i < kLatent; ++i) norm[size_t(i)] = 0.5f + 0.01f * float(i);
  for (int i = 0; i < kRope / 2; ++i) {
    cos[size_t(i)] = std::cos(float(i + 1));
    sin[size_t(i)] = std::sin(float(i + 1));
  }
  double squares = 0;
  float played = 0;
  for (int i = 0; i < kLatent; ++i) squares += double(bf16_at(row.data(), i)) * bf16_at(row.data(), i);
  for (int lane = 0; lane < kWarpSize; ++lane) played += mla_squares(row.data(), kLatent, lane);
  CHECK(std::abs(played - squares) < 1e-4 * squares);
  const float inverse = float(1.0 / std::sqrt(squares / kLatent + 1e-6));
  for (const bool neighbours : {false, true}) {
    std::vector<uint16_t> out(kLatent + kRope, 0x7fc0);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      mla_normalise(row.data(), norm.data(), inverse, kLatent, lane, out.data());
      mla_rotate(row.data() + kLatent, cos.data(), sin.data(), kRope, neighbours, lane, out.data() + kLatent);
    }
    for (int i = 0; i < kLatent; ++i) {
      const double wanted = bf16_at(row.data(), i) * double(inverse) * norm[size_t(i)];
      CHECK(std::abs(bf16_at(out.data(), i) - wanted) <= std::abs(wanted) / 200);
    }
    for (int i = 0; i < kRope / 2; ++i) {
      const int first = kLatent + (neighbours ? 2 * i : i);
      const int second = kLatent + (neighbours ? 2 * i + 1 : kRope / 2 + i);
      const double a = bf16_at(row.data(), first), b = bf16_at(row.data(), second);
      const double c = cos[size_t(i)], s = sin[size_t(i)];
      CHECK(std::abs(bf16_at(out.data(), kLatent + i) - (a * c - b * s)) < 0.03);
      CHECK(std::abs(bf16_at(out.data(), kLatent + kRope / 2 + i) - (b * c + a * s)) < 0.03);
    }
  }
}
