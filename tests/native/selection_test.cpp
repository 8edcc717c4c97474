// Positions chosen one by one for each token, as a learned indexer chooses them.
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

constexpr int kStride = 3;

// Whether the token attends to a position: every third up to 300, and from 700 on. `from`: first position of its stretch.
bool has(int token, int position, int from = 0) {
  return position >= from && position <= kLength - kTokens + token &&
         position % kStride == (token + 1) % kStride && (position < 300 || position >= 700);
}

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

struct Tensors {
  std::vector<float> keys = drawn(kLength * kWidth, 1), values = drawn(kLength * kWidth, 2),
                     queries = drawn(kTokens * kHeads * kWidth, 3);
};

// With a bound of the chosen positions, those that has() names; or all if it is the length.
std::vector<float> attended(int threads, int tile_tokens, const Tensors& tensors, const Selection& select,
                            kernels::DType dtype = kernels::DType::kF32) {
  const auto& [keys, values, queries] = tensors;
  constexpr int kPages = (kLength + kPage - 1) / kPage;
  const std::vector<LayerState> layers{{{{2, kWidth, dtype}}, 0}};
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
  batch.chosen.start(kTokens, select.most);
  for (int t = 0; t < kTokens && select.most > 0; ++t) {
    std::vector<int32_t> list;
    for (int p = 0; p <= positions[size_t(t)]; ++p) {
      if (select.most == kLength || has(t, p)) list.push_back(p);
    }
    batch.chosen.assign(t, list);
  }
  const auto lock = pool.lock_scratch();
  const BlockedAttention attention(kernels::kernel_table(), pool, scores, select, 3);
  attention.run(Source(cache, queries, out), batch, batch.tiles(tile_tokens), kPage);
  return out;
}

}  // namespace

// In float64, over the chosen positions from `from` on.
void check_softmax(const Tensors& tensors, const std::vector<float>& out, int window) {
  const auto& [keys, values, queries] = tensors;
  for (int row = 0; row < kTokens * kHeads; ++row) {
    const int token = row / kHeads, from = window > 0 ? kLength - kTokens + token + 1 - window : 0;
    double total = 0;
    std::vector<double> sums(kWidth, 0.0);
    for (int p = 0; p < kLength; ++p) {
      if (!has(token, p, from)) continue;
      double score = 0;
      for (int i = 0; i < kWidth; ++i)
        score += double(queries[size_t(row * kWidth + i)]) * double(keys[size_t(p * kWidth + i)]);
      const double weight = std::exp(0.25 * score);
      total += weight;
      for (int i = 0; i < kWidth; ++i) sums[size_t(i)] += weight * double(values[size_t(p * kWidth + i)]);
    }
    for (int i = 0; i < kWidth; ++i) {
      const double expected = total > 0 ? sums[size_t(i)] / total : 0.0;
      CHECK(std::abs(double(out[size_t(row * kWidth + i)]) - expected) < 1e-5);
    }
  }
}
CASE(attention_reads_the_chosen_positions_of_its_stretch) {
  const Tensors tensors;
  for (const int window : {0, 500, 2}) {  // none of the last two positions is chosen
    const Selection select{.stretch = {.window = window}, .most = kLength / 2};
    const std::vector<float> out = attended(1, kTokens, tensors, select);
    check_softmax(tensors, out, window);
    CHECK(attended(2, 1, tensors, select) == out);
  }
}

CASE(attention_to_a_list_of_all_positions_is_full_attention) {
  const Tensors tensors;
  for (const int window : {0, 600}) {
    for (const auto dtype : {kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kI8}) {
      const Selection all{.stretch = {.window = window}}, listed{all.stretch, kLength};
      CHECK(attended(1, kTokens, tensors, listed, dtype) == attended(2, 2, tensors, all, dtype));
    }
  }
}

CASE(the_largest_scores_are_kept_and_equal_ones_by_position) {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> scores{1, 3, nan, 2, 3, -infinity, 2, 2};
  ChosenPositions chosen;
  const auto kept = [&](int most, int n) {
    chosen.start(2, most);
    chosen.keep_top(1, scores.data(), n);
    CHECK_EQUAL(chosen.of(0).size(), 0u);
    const auto list = chosen.of(1);
    return std::vector<int>(list.begin(), list.end());
  };
  CHECK((kept(1, 8) == std::vector{1}));
  CHECK((kept(4, 8) == std::vector{1, 3, 4, 6}));
  CHECK((kept(7, 8) == std::vector{0, 1, 2, 3, 4, 6, 7}));
  CHECK((kept(8, 8) == std::vector{0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK((kept(9, 3) == std::vector{0, 1, 2}));
}

int main(int argc, char** argv) { return test::main(argc, argv); }
