// Gated delta nets on the SIMT machine against a scalar reference in double precision.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "delta_layer.h"
#include "watched_run.h"

using namespace twofold::cuda;
using test::WatchedRun;

namespace {

struct Net {
  int k_heads, of_key, K, V, taps;
  int v_heads() const { return k_heads * of_key; }
  int channels() const { return 2 * k_heads * K + v_heads() * V; }
  int stride() const { return channels() + v_heads() * V + 2 * v_heads() + 3; }
  int blocks() const { return (V + kDeltaBlockColumns - 1) / kDeltaBlockColumns; }
  size_t slab() const { return size_t(v_heads() * blocks()) * size_t(delta_slab_floats(K)); }
};

// Outputs [tokens][value heads][V] of one sequence from its first token on.
std::vector<double> expected_of(const Net& net, const std::vector<uint16_t>& rows, int count,
                                const std::vector<float>& conv, const std::vector<float>& rate,
                                const std::vector<float>& bias) {
  const auto input = [&](int t, int i) {
    return double(test::float_of_bf16(rows[size_t(t * net.stride() + i)]));
  };
  const auto convolved = [&](int t, int channel) {
    double sum = 0;
    for (int j = 0; j < net.taps; ++j) {
      const int from = t - net.taps + 1 + j;
      if (from >= 0) sum += double(conv[size_t(channel * net.taps + j)]) * input(from, channel);
    }
    return sum / (1 + std::exp(-sum));
  };
  std::vector<double> out;
  std::vector<double> state(size_t(net.v_heads() * net.K * net.V));
  for (int t = 0; t < count; ++t) {
    for (int h = 0; h < net.v_heads(); ++h) {
      const int key = h / net.of_key * net.K;
      std::vector<double> q, k;
      double qq = 1e-6, kk = 1e-6;
      for (int i = 0; i < net.K; ++i) {
        q.push_back(convolved(t, key + i));
        k.push_back(convolved(t, net.k_heads * net.K + key + i));
        qq += q.back() * q.back();
        kk += k.back() * k.back();
      }
      const int gates = net.channels() + net.v_heads() * net.V;
      const double beta = 1 / (1 + std::exp(-input(t, gates + h)));
      const double a = input(t, gates + net.v_heads() + h) + double(bias[size_t(h)]);
      const double decay = std::exp(double(rate[size_t(h)]) * std::log1p(std::exp(a)));
      for (int v = 0; v < net.V; ++v) {
        double* of_state = state.data() + (h * net.V + v) * net.K;
        double seen = 0, answer = 0;
        for (int i = 0; i < net.K; ++i) {
          of_state[i] *= decay;
          seen += of_state[i] * k[size_t(i)] / std::sqrt(kk);
        }
        const double delta = beta * (convolved(t, 2 * net.k_heads * net.K + h * net.V + v) - seen);
        for (int i = 0; i < net.K; ++i) {
          of_state[i] += k[size_t(i)] / std::sqrt(kk) * delta;
          answer += of_state[i] * q[size_t(i)] / std::sqrt(qq * net.K);
        }
        out.push_back(answer);
      }
    }
  }
  return out;
}

// Two sequences, the first of which has had a chunk of its prompt, take a step together with padding; then once more.
void check_delta(const Net& net) {
  constexpr int kRecords = 3, kChunk = 5;
  const int width = net.v_heads() * net.V;
  const auto prompt = test::random_bf16(size_t((kChunk + 1) * net.stride()), 1);
  const auto other = test::random_bf16(size_t(net.stride()), 2);
  const auto conv = test::random_floats(size_t(net.channels() * net.taps), 3);
  auto rate = test::random_floats(size_t(net.v_heads()), 4);
  for (float& each : rate) each = -std::abs(each);
  const auto bias = test::random_floats(size_t(net.v_heads()), 5);
  const auto expected = expected_of(net, prompt, kChunk + 1, conv, rate, bias);
  const auto expected_other = expected_of(net, other, 1, conv, rate, bias);
  const auto compare = [&](const float* ours, const double* theirs, int count) {
    for (int i = 0; i < count; ++i) {
      if (!(std::abs(double(ours[i]) - theirs[i]) <= 1e-4 * (1 + std::abs(theirs[i]))))
        test::fail("delta", 0, std::to_string(ours[i]) + " instead of " + std::to_string(theirs[i]));
    }
  };
  test::under_schedules([&](WatchedRun& run) {
    // What the last owner left is of no use to a new sequence: not a number.
    auto* slabs = run.copy("slabs", std::vector<float>(kRecords * net.slab(), NAN));
    const size_t of_tail = size_t(net.taps * net.channels());
    auto* tail = run.copy("tail", std::vector<uint16_t>(kRecords * of_tail, 0x7fc0));
    const DeltaRecords records{slabs, tail, net.k_heads, net.v_heads(), net.K, net.V, net.taps};
    const auto rows_of = [&](const std::vector<uint16_t>& rows, const std::vector<int64_t>& positions,
                             const std::vector<int32_t>& numbers) {
      return DeltaRows{run.copy("projected", rows),
                       net.stride(),
                       run.copy("conv", conv),
                       run.copy("decay_rate", rate),
                       run.copy("decay_bias", bias),
                       run.copy("positions", positions),
                       run.copy("records", numbers),
                       int(numbers.size()),
                       int(positions.size() / numbers.size()),
                       nullptr};
    };
    const auto keep = [&](const uint16_t* row, int record, int position) {
      std::copy_n(row, net.channels(),
                  tail + size_t(record) * of_tail + size_t(position % net.taps * net.channels()));
    };
    const std::vector<uint16_t> chunk(prompt.begin(), prompt.begin() + kChunk * net.stride());
    auto* first = run.memory<float>("first", size_t(kChunk * width));
    run.check(launch_delta(rows_of(chunk, {0, 1, 2, 3, 4}, {2}), records, first, nullptr), "delta");
    compare(first, expected.data(), kChunk * width);
    for (int t = std::max(0, kChunk - net.taps); t < kChunk; ++t)
      keep(&prompt[size_t(t * net.stride())], 2, t);

    std::vector<uint16_t> both(prompt.begin() + kChunk * net.stride(), prompt.end());
    both.insert(both.end(), other.begin(), other.end());
    both.insert(both.end(), other.begin(), other.end());
    for (int again = 0; again < 2; ++again) {
      auto* out = run.memory<float>("step", size_t(3 * width));
      run.check(launch_delta(rows_of(both, {kChunk, 0, 7}, {2, 0, -1}), records, out, nullptr), "delta");
      compare(out, &expected[size_t(kChunk * width)], width);
      compare(out + width, expected_other.data(), width);
      for (int i = 0; i < width; ++i) CHECK(out[2 * width + i] == 0);
      keep(both.data(), 2, kChunk);
      keep(other.data(), 0, 0);
    }
  });
}

// A sequence's newest token and two drafts, in rows of one token with records of their own, beside padding; twice, as
// after a lost step. Then the state after the first draft is continued.
void check_chain(const Net& net) {
  constexpr int kBefore = 3, kRows = 3, kRecords = 3, kOwn = 2;
  const int width = net.v_heads() * net.V;
  const size_t row_size = size_t(net.stride()), of_tail = size_t(net.taps * net.channels());
  const auto tokens = test::random_bf16((kBefore + kRows) * row_size, 1);
  const auto conv = test::random_floats(size_t(net.channels() * net.taps), 3);
  auto rate = test::random_floats(size_t(net.v_heads()), 4);
  for (float& each : rate) each = -std::abs(each);
  const auto bias = test::random_floats(size_t(net.v_heads()), 5);
  const auto expected = expected_of(net, tokens, kBefore + kRows, conv, rate, bias);
  test::under_schedules([&](WatchedRun& run) {
    auto* slabs = run.copy("slabs", std::vector<float>(kRecords * net.slab(), NAN));
    auto* tail = run.copy("tail", std::vector<uint16_t>(kRecords * of_tail, 0x7fc0));
    const DeltaRecords records{slabs, tail, net.k_heads, net.v_heads(), net.K, net.V, net.taps};
    const auto keep = [&](int token, int record) {
      std::copy_n(&tokens[size_t(token) * row_size], net.channels(),
                  tail + size_t(record) * of_tail + size_t(token % net.taps * net.channels()));
    };
    const auto launch = [&](int first, int count, int num_tokens, const std::vector<int32_t>& numbers,
                            const std::vector<int32_t>& chain) {
      std::vector<uint16_t> rows(tokens.begin() + std::ptrdiff_t(size_t(first) * row_size),
                                 tokens.begin() + std::ptrdiff_t(size_t(first + count) * row_size));
      rows.resize(numbers.size() * size_t(num_tokens) * row_size);
      std::vector<int64_t> positions;
      for (size_t i = 0; i < numbers.size() * size_t(num_tokens); ++i) positions.push_back(first + int(i));
      auto* out = run.memory<float>("out", numbers.size() * size_t(num_tokens * width));
      const DeltaRows given{run.copy("projected", rows),
                            net.stride(),
                            run.copy("conv", conv),
                            run.copy("decay_rate", rate),
                            run.copy("decay_bias", bias),
                            run.copy("positions", positions),
                            run.copy("records", numbers),
                            int(numbers.size()),
                            num_tokens,
                            chain.empty() ? nullptr : run.copy("chain", chain)};
      run.check(launch_delta(given, records, out, nullptr), "delta");
      for (int i = 0; i < count * width; ++i) {
        const double theirs = expected[size_t(first * width + i)];
        if (!(std::abs(double(out[i]) - theirs) <= 1e-4 * (1 + std::abs(theirs))))
          test::fail("delta", 0, std::to_string(out[i]) + " instead of " + std::to_string(theirs));
      }
      return out;
    };
    launch(0, kBefore, kBefore, {kOwn}, {});
    for (int t = 0; t < kBefore; ++t) keep(t, kOwn);
    for (int again = 0; again < 2; ++again) {
      const float* out = launch(kBefore, kRows, 1, {kOwn, 0, 1, -1}, {0, 1, 2, 0});
      for (int i = 0; i < width; ++i) CHECK(out[kRows * width + i] == 0);
    }
    std::copy_n(tail + kOwn * of_tail, of_tail, tail);  // of record 0: the first draft's
    keep(kBefore, 0);
    keep(kBefore + 1, 0);
    launch(kBefore + 2, 1, 1, {0}, {});
  });
}

}  // namespace

CASE(delta_nets_verify_drafts) {
  check_chain({2, 2, 5, 37, 4});
  check_chain({1, 1, 130, 3, 2});
}

CASE(delta_nets_carry_states_as_the_scalar_one) {
  check_delta({2, 2, 5, 37, 4});
  check_delta({1, 1, 130, 3, 2});
}

CASE(delta_nets_refuse_what_they_cannot_carry) {
  DeltaRecords records{nullptr, nullptr, 1, 1, kDeltaMaxKeys + 1, 1, 4};
  CHECK(launch_delta({}, records, nullptr, nullptr) != 0);
}
