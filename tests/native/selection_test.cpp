// A kind of selection that attention does not know: positions chosen one by one, as a learned indexer chooses them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "host/thread_pool.h"
#include "ops/attention/blocked_attention.h"
#include "ops/state_cache.h"
#include "twofold/kernels.h"

namespace {

using namespace twofold;

constexpr int kWidth = 16, kHeads = 3, kLength = 1100, kTokens = 5, kPage = 32;

class Chosen final : public Selection {
 public:
  // Every third position up to 300, none in the second block, and the token's own.
  static bool has(int token, int position) {
    return position == kLength - kTokens + token || (position < 300 && position % 3 == token % 3);
  }
  int first(int) const override { return 0; }
  bool keep(int token, int begin, int end, float* scores) const override {
    bool any = false;
    for (int position = begin; position < end; ++position) {
      if (has(token, position)) {
        any = true;
      } else {
        scores[position - begin] = -std::numeric_limits<float>::infinity();
      }
    }
    return any;
  }
};

class Source final : public AttentionSource {
 public:
  Source(const StateCache& cache, const std::vector<float>& queries, std::vector<float>& out)
      : planes_(cache.planes(0)), queries_(queries), out_(out) {}
  int parts() const override { return 1; }
  int heads(int) const override { return kHeads; }
  int first_head(int) const override { return 0; }
  const StatePlane& keys(int) const override { return planes_[0]; }
  const StatePlane& values(int) const override { return planes_[1]; }
  const float* queries(const AttentionTile& tile, int, float*) const override {
    return queries_.data() + tile.first_token * kHeads * kWidth;
  }
  void take(const AttentionTile& tile, int, const float* sums) const override {
    std::copy_n(sums, tile.num_tokens * kHeads * kWidth,
                out_.begin() + int64_t{tile.first_token} * kHeads * kWidth);
  }

 private:
  const std::vector<StatePlane>& planes_;
  const std::vector<float>& queries_;
  std::vector<float>& out_;
};

std::vector<float> drawn(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TensorView view(void* data, ElementType type, std::initializer_list<int64_t> shape) {
  TensorView found{.data = data, .type = type, .num_dims = static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), found.shape);
  found.contiguous = found.writable = true;
  return found;
}

std::vector<float> attended(int threads, int tile_tokens, const std::vector<float>& keys,
                            const std::vector<float>& values, const std::vector<float>& queries) {
  constexpr int kPages = (kLength + kPage - 1) / kPage;
  const std::vector<LayerState> layers{{{{2, kWidth, kernels::DType::kF32}}, 0}};
  StateCache cache(layers, kPages, kPage);
  std::vector<int32_t> pages(kPages), positions(kTokens), sequences(kTokens, 0);
  for (int page = 0; page < kPages; ++page) pages[size_t(page)] = kPages - 1 - page;
  for (int t = 0; t < kTokens; ++t) positions[size_t(t)] = kLength - kTokens + t;
  std::vector<float> rotation(kTokens, 1.0f), out(size_t(kTokens * kHeads * kWidth));
  for (int p = 0; p < kLength; ++p) {
    const int64_t at = int64_t{pages[size_t(p / kPage)]} * kPage + p % kPage;
    store_row(kernels::kernel_table(), keys.data() + p * kWidth, cache.planes(0)[0], at);
    store_row(kernels::kernel_table(), values.data() + p * kWidth, cache.planes(0)[1], at);
  }
  AttentionBatch batch(view(positions.data(), ElementType::kI32, {kTokens}),
                       view(sequences.data(), ElementType::kI32, {kTokens}),
                       view(pages.data(), ElementType::kI32, {1, kPages}),
                       view(rotation.data(), ElementType::kF32, {kTokens, 1}),
                       view(rotation.data(), ElementType::kF32, {kTokens, 1}));
  ThreadPool pool(plan_pool(threads, "off"));
  const Scores scores{.rule = {.scale = 0.25f}};
  const Chosen select;
  const auto lock = pool.lock_scratch();
  const BlockedAttention attention(kernels::kernel_table(), pool, scores, select, 3);
  attention.run(Source(cache, queries, out), batch, batch.tiles(tile_tokens), kPage);
  return out;
}

}  // namespace

CASE(attention_follows_a_selection_of_a_new_kind) {
  const auto keys = drawn(kLength * kWidth, 1), values = drawn(kLength * kWidth, 2);
  const auto queries = drawn(kTokens * kHeads * kWidth, 3);
  const std::vector<float> out = attended(1, kTokens, keys, values, queries);
  for (int row = 0; row < kTokens * kHeads; ++row) {
    double total = 0;
    std::vector<double> sums(kWidth, 0.0);
    for (int p = 0; p < kLength; ++p) {
      if (!Chosen::has(row / kHeads, p)) continue;
      double score = 0;
      for (int i = 0; i < kWidth; ++i)
        score += double(queries[size_t(row * kWidth + i)]) * double(keys[size_t(p * kWidth + i)]);
      const double weight = std::exp(0.25 * score);
      total += weight;
      for (int i = 0; i < kWidth; ++i) sums[size_t(i)] += weight * double(values[size_t(p * kWidth + i)]);
    }
    for (int i = 0; i < kWidth; ++i)
      CHECK(std::abs(double(out[size_t(row * kWidth + i)]) - sums[size_t(i)] / total) < 1e-5);
  }
  CHECK(attended(2, 1, keys, values, queries) == out);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
