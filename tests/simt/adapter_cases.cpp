// Low-rank products of adapters on the SIMT machine: rows of two adapters and none, of a plain matrix, of heads and of experts.
#include <cmath>

#include "low_rank_layer.h"
#include "watched_run.h"

using namespace twofold;
using namespace twofold::cuda;
using test::WatchedRun;

namespace {

constexpr int kAdapters = 3, kTokens = 5, kMaxRank = 11;

// A product of `parts` stacked matrices for each of `entries`, of which adapter 1 leaves the last part alone.
struct Product {
  int entries, per_token, columns, part_rows, parts;
  bool is_f32;  // factors, inputs and outputs

  int width() const { return parts * part_rows; }
  int rows() const { return kTokens * per_token; }
  int rank(int adapter, int part) const { return adapter == 1 && part == parts - 1 ? 0 : 3 + 4 * adapter; }
};

struct Factors {
  std::vector<float> a, b;  // [rank][columns], [rank][rows]
};

Factors factors_of(const Product& of, int adapter, int entry, int part) {
  const int rank = of.rank(adapter, part);
  const auto seed = uint32_t(100 * adapter + 10 * entry + part);
  Factors made{test::random_floats(size_t(rank * of.columns), seed),
               test::random_floats(size_t(rank * of.part_rows), seed + 7)};
  for (std::vector<float>* values : {&made.a, &made.b}) {
    for (float& value : *values) value = of.is_f32 ? value : test::rounded(value);
  }
  return made;
}

std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  for (const float value : values) out.push_back(bf16_of_float(value));
  return out;
}

const void* copy(WatchedRun& run, const std::string& name, const std::vector<float>& values, bool is_f32) {
  if (is_f32) return run.copy(name, values);
  return run.copy(name, as_bf16(values));
}

struct Placed {
  std::vector<int32_t> adapters{1, -1, 2, 1, 0};
  std::vector<int32_t> entries;  // empty: the row's place in its token
  std::vector<uint8_t> where;    // empty: all are here
};

// t and y of every row that uses an adapter, and no other.
void check(const Product& of, const Placed& placed, bool adds) {
  const std::vector<float> x = [&] {
    std::vector<float> made = test::random_floats(size_t(kTokens * of.columns), 5);
    for (float& value : made) value = of.is_f32 ? value : test::rounded(value);
    return made;
  }();
  const std::vector<float> before = test::random_floats(size_t(of.rows() * of.width()), 6);
  test::under_schedules([&](WatchedRun& run) {
    std::vector<LowRankFactors> table;
    for (int adapter = 0; adapter < kAdapters; ++adapter) {
      for (int entry = 0; entry < of.entries; ++entry) {
        for (int part = 0; part < of.parts; ++part) {
          const int rank = of.rank(adapter, part);
          if (rank == 0) {
            table.push_back({});
            continue;
          }
          const Factors own = factors_of(of, adapter, entry, part);
          table.push_back({copy(run, "a", own.a, of.is_f32), copy(run, "b", own.b, of.is_f32),
                           part * of.part_rows, of.part_rows, rank, of.is_f32 ? 3 : 0});
        }
      }
    }
    const LowRankTable native{run.copy("table", table), of.entries, of.parts, 0, of.parts, kMaxRank};
    const AdaptedRows rows{run.copy("adapters", placed.adapters),
                           placed.entries.empty() ? nullptr : run.copy("entries", placed.entries),
                           placed.where.empty() ? nullptr : run.copy("where", placed.where), kTokens,
                           of.per_token};
    auto* t = run.memory<float>("t", size_t(of.rows() * of.parts * kMaxRank));
    void* y = const_cast<void*>(copy(run, "y", before, of.is_f32));
    run.check(
        launch_low_rank_down(native, rows,
                             {copy(run, "x", x, of.is_f32), of.is_f32, of.per_token, of.columns, of.columns},
                             t, nullptr),
        "down");
    run.check(launch_low_rank_up(native, rows, t, {y, of.is_f32, adds, of.width(), of.width()}, nullptr),
              "up");
    for (int row = 0; row < of.rows(); ++row) {
      const int adapter = placed.adapters[size_t(row / of.per_token)];
      const int entry = placed.entries.empty() ? row % of.per_token : placed.entries[size_t(row)];
      const bool is_here = placed.where.empty() || placed.where[size_t(row)] == kHit;
      for (int part = 0; part < of.parts; ++part) {
        const bool changes = is_here && adapter >= 0 && entry >= 0 && of.rank(adapter, part) > 0;
        const Factors own = changes ? factors_of(of, adapter, entry, part) : Factors{};
        for (int n = 0; n < of.part_rows; ++n) {
          const size_t at = size_t(row) * size_t(of.width()) + size_t(part * of.part_rows + n);
          double wanted = 0, magnitude = 0;
          for (int r = 0; changes && r < of.rank(adapter, part); ++r) {
            double sum = 0;
            for (int c = 0; c < of.columns; ++c)
              sum += double(own.a[size_t(r * of.columns + c)]) *
                     double(x[size_t(row / of.per_token * of.columns + c)]);
            const double term = sum * double(own.b[size_t(r * of.part_rows + n)]);
            wanted += term;
            magnitude += std::abs(term) + of.columns * std::abs(double(own.b[size_t(r * of.part_rows + n)]));
          }
          const float old = of.is_f32 ? before[at] : test::rounded(before[at]);
          if (adds || !is_here) wanted += double(old);
          const double ours =
              of.is_f32 ? static_cast<float*>(y)[at] : test::float_of_bf16(static_cast<uint16_t*>(y)[at]);
          const double room = 1e-5 * magnitude + (of.is_f32 ? 0 : std::abs(wanted) / 250) + 1e-30;
          if (!(std::abs(ours - wanted) <= room))
            test::fail("low rank", row, std::to_string(ours) + " instead of " + std::to_string(wanted));
        }
      }
    }
  });
}

}  // namespace

CASE(low_rank_products_of_a_stack_of_matrices) {
  for (const bool is_f32 : {false, true}) check({1, 1, 70, 37, 3, is_f32}, {}, true);
}

CASE(low_rank_products_of_heads) { check({4, 4, 33, 300, 1, false}, {}, true); }

CASE(low_rank_products_of_experts) {
  Placed placed;
  placed.entries = {0, 2, 1, 0, 2, 1, 0, 1, -1, -1};
  placed.where = {kHit, kCpu, kHit, kHit, kHit, kHit, kCpu, kHit, kPadding, kPadding};
  check({3, 2, 64, 40, 2, true}, placed, false);
  check({3, 2, 64, 40, 1, true}, placed, true);
}

CASE(rows_of_an_embedding_are_gathered) {
  constexpr int kVocabulary = 9, kRank = 3;
  const std::vector<float> a = test::random_floats(kVocabulary * kRank, 3);
  const std::vector<int64_t> ids{8, 0, 3, 3, 1};
  const Placed placed;
  test::under_schedules([&](WatchedRun& run) {
    std::vector<LowRankFactors> table(kAdapters);
    table[2] = {run.copy("a", a), nullptr, 0, 0, kRank, 1};
    const LowRankTable native{run.copy("table", table), 1, 1, 0, 1, kMaxRank};
    auto* t = run.copy("t", std::vector<float>(kTokens * kMaxRank, -1.0f));
    run.check(
        launch_low_rank_gather(native, {run.copy("adapters", placed.adapters), nullptr, nullptr, kTokens, 1},
                               run.copy("ids", ids), t, nullptr),
        "gather");
    for (int row = 0; row < kTokens; ++row) {
      for (int r = 0; r < kMaxRank; ++r) {
        const bool is_own = placed.adapters[size_t(row)] == 2 && r < kRank;
        CHECK(t[row * kMaxRank + r] == (is_own ? a[size_t(ids[size_t(row)] * kRank + r)] : -1.0f));
      }
    }
  });
}

CASE(low_rank_launches_refuse_what_does_not_fit) {
  const LowRankFactors factors{};
  const int32_t adapters[] = {0};
  float t[8] = {};
  const LowRankTable table{&factors, 1, 1, 0, 1, 8};
  const AdaptedRows rows{adapters, nullptr, nullptr, 1, 1};
  const LowRankOutput output{t, true, true, 8, 8};
  CHECK(launch_low_rank_down(table, rows, {nullptr, true, 1, 8, 8}, t, nullptr) != 0);
  CHECK(launch_low_rank_down({nullptr, 1, 1, 0, 1, 8}, rows, {t, true, 1, 8, 8}, t, nullptr) != 0);
  CHECK(launch_low_rank_up({&factors, 1, 1, 1, 1, 8}, rows, t, output, nullptr) != 0);
  CHECK(launch_low_rank_up(table, {adapters, nullptr, nullptr, 1, 2}, t, output, nullptr) != 0);
  CHECK(launch_low_rank_up(table, rows, t, {t, true, true, 0, 8}, nullptr) != 0);
  CHECK(launch_low_rank_gather(table, rows, nullptr, t, nullptr) != 0);
}
