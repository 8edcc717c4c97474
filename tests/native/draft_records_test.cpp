// Records of drafts: a layer writes the state after each token of a step to a record of its own, and the accepted
// one becomes the sequence's. Built with the thread sanitizer, with all that reads or writes records.
#include <algorithm>
#include <array>
#include <random>
#include <type_traits>
#include <vector>

#include "check.h"
#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/recurrent/short_convolution.h"
#include "ops/state_cache.h"
#include "twofold/kernels.h"

namespace {

using namespace twofold;

constexpr int kHidden = 32, kTaps = 4, kSequences = 3, kDepth = 4;

template <class T>
TensorView view(std::vector<T>& values, std::initializer_list<int64_t> shape) {
  TensorView found;
  found.data = values.data();
  found.type = std::is_same_v<T, float> ? ElementType::kF32 : ElementType::kI32;
  found.num_dims = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), found.shape);
  found.contiguous = found.writable = true;
  return found;
}

std::vector<float> drawn(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

PackedMatrix packed(ThreadPool& pool, const std::vector<float>& values, int64_t rows) {
  const SourceMatrix source{kernels::WeightFormat::kF32, reinterpret_cast<const std::byte*>(values.data()),
                            rows, kHidden, kHidden * int64_t{sizeof(float)}};
  return PackedMatrix(pool, {&source, 1});
}

// Consecutive tokens of one sequence in a step.
struct Run {
  int record, position;
  std::vector<float> rows;    // [tokens, hidden]
  std::vector<int32_t> kept;  // per token
};

// A layer with records, and a pool of its own.
struct Layer {
  explicit Layer(int threads, int num_records)
      : pool(plan_pool(threads, "off")),
        cache(std::vector<LayerState>{{{}, TailConvolution{nullptr, kTaps, kHidden}.record_bytes()},
                                      {{{1, 8, kernels::DType::kF32}}, 0}},
              1, 4, num_records) {}

  void forward(const std::vector<Run>& runs) {
    std::vector<int32_t> positions, sequences, kept, records;
    std::vector<float> hidden;
    for (const Run& run : runs) {
      for (size_t t = 0; t < run.kept.size(); ++t) {
        positions.push_back(run.position + static_cast<int32_t>(t));
        sequences.push_back(static_cast<int32_t>(records.size()));
      }
      records.push_back(run.record);
      kept.insert(kept.end(), run.kept.begin(), run.kept.end());
      hidden.insert(hidden.end(), run.rows.begin(), run.rows.end());
    }
    const int64_t T = std::ssize(positions), S = std::ssize(records);
    std::vector<int32_t> pages(static_cast<size_t>(S), 0);
    std::vector<float> rotation(static_cast<size_t>(T), 1.0f), sum(hidden.size(), 0.0f);
    const TensorView numbers = view(records, {S});
    AttentionBatch batch(view(positions, {T}), view(sequences, {T}), view(pages, {S, 1}),
                         view(rotation, {T, 1}), view(rotation, {T, 1}), &numbers);
    batch.keep_records(view(kept, {T}));
    block.forward(hidden.data(), sum.data(), batch, cache, 0);
  }

  ThreadPool pool;
  StateCache cache;
  std::vector<float> norm = std::vector<float>(kHidden, 1.0f), conv = drawn(kTaps * kHidden, 1),
                     in = drawn(3 * kHidden * kHidden, 2), out = drawn(kHidden * kHidden, 3);
  PackedMatrix packed_in = packed(pool, in, 3 * kHidden), packed_out = packed(pool, out, kHidden);
  ShortConvolution block{kernels::kernel_table(),
                         pool,
                         {.project = {.weight = &packed_in, .norm = norm.data(), .eps = 1e-6f},
                          .conv = {conv.data(), kTaps, kHidden},
                          .conv_bias = nullptr,
                          .out = {.weight = &packed_out}}};
};

struct Sequence {
  int record;
  std::array<int, kDepth> spare;
  int length = 0;
};

void accept_and_reject(int steps) {
  Layer drafted(3, kSequences * (1 + kDepth)), single(1, kSequences);
  std::array<Sequence, kSequences> sequences;
  for (int s = 0; s < kSequences; ++s) {
    sequences[size_t(s)].record = s;
    for (int d = 0; d < kDepth; ++d) sequences[size_t(s)].spare[size_t(d)] = kSequences + s * kDepth + d;
  }
  std::mt19937 random(7);
  for (int step = 0; step < steps; ++step) {
    std::vector<Run> runs;
    std::array<int, kSequences> accepted{};
    for (int s = 0; s < kSequences; ++s) {
      Sequence& sequence = sequences[size_t(s)];
      if (random() % 64 == 0) sequence.length = 0;  // cancelled; another begins
      const int depth = static_cast<int>(random() % (kDepth + 1));
      accepted[size_t(s)] = static_cast<int>(random() % (static_cast<unsigned>(depth) + 1));
      Run run{sequence.record, sequence.length, drawn(size_t(1 + depth) * kHidden, uint32_t(random())),
              std::vector<int32_t>(sequence.spare.begin(), sequence.spare.begin() + depth)};
      run.kept.push_back(-1);  // the last state is in the sequence's record
      runs.push_back(std::move(run));
    }
    drafted.forward(runs);
    for (int s = 0; s < kSequences; ++s) {
      Sequence& sequence = sequences[size_t(s)];
      const Run& run = runs[size_t(s)];
      const size_t kept = size_t(accepted[size_t(s)]);
      for (size_t t = 0; t <= kept; ++t) {
        const auto row = run.rows.begin() + int64_t(t) * kHidden;
        single.forward({{s, run.position + int(t), {row, row + kHidden}, {-1}}});
      }
      if (kept + 1 < run.kept.size()) std::swap(sequence.record, sequence.spare[kept]);
      sequence.length += 1 + int(kept);
      const auto ours = drafted.cache.record(0, sequence.record), expected = single.cache.record(0, s);
      // Slots that no token of the sequence has written are the last owner's.
      const int written = std::min(sequence.length, kTaps - 1);
      CHECK(std::equal(ours.begin(), ours.begin() + written * kHidden * 4, expected.begin()));
    }
  }
}

}  // namespace

CASE(records_follow_accepted_drafts) { accept_and_reject(1'000); }

CASE(records_follow_ten_thousand_steps_of_drafts) { accept_and_reject(10'000); }

int main(int argc, char** argv) { return test::main(argc, argv); }
