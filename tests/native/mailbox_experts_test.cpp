// The CPU's experts behind the mailbox, against the same experts run directly; and a step served whole.
#include "device/mailbox_experts.h"

#include <cmath>
#include <random>
#include <stdexcept>

#include "check.h"
#include "f32_experts.h"
#include "number_formats.h"

using namespace twofold;

namespace {

constexpr int kHidden = 64, kIntermediate = 32, kExperts = 6, kTopK = 3, kTokens = 5;

struct Fixture {
  ThreadPool pool{2};
  std::vector<float> weights;
  ExpertStore store;
  std::mt19937 random{5};
  std::vector<int32_t> ids;
  std::vector<float> gates;
  std::vector<uint8_t> where;
  std::vector<uint16_t> activations;
  std::vector<float> results;

  Fixture() : store(kExperts, {kHidden, kIntermediate}, formats()) {
    std::normal_distribution<float> normal;
    weights.resize(size_t(3 * kExperts * kHidden * kIntermediate));
    for (float& w : weights) w = normal(random) * 0.2f;
    store.put(pool, 0, 0, test::f32_experts(weights, kExperts, kHidden, kIntermediate));
    for (int t = 0; t < kTokens; ++t) {
      for (int k = 0; k < kTopK; ++k) {
        ids.push_back(int32_t((t + 2 * k) % kExperts));
        gates.push_back(0.5f / float(k + 1));
        where.push_back(uint8_t(random() % cuda::kPadding));
      }
    }
    for (int i = 0; i < kTokens * kHidden; ++i) activations.push_back(cuda::bf16_of_float(normal(random)));
    results.assign(size_t(kTokens * kHidden), NAN);
  }

  static const std::vector<LayerFormats>& formats() {
    static const std::vector<LayerFormats> all(
        1, {{kernels::WeightFormat::kF32, kernels::WeightFormat::kF32, kernels::WeightFormat::kF32}});
    return all;
  }
  PostedLayer posted() {
    int on_cpu = 0;
    for (const uint8_t w : where) on_cpu += w == cuda::kCpu;
    return {kTokens,        on_cpu, ids.data(), gates.data(), where.data(), activations.data(),
            results.data(), nullptr};
  }

  // Double precision, from the weights as they were given.
  std::vector<double> expected() const {
    std::vector<double> sums(size_t(kTokens * kHidden), 0.0);
    for (int p = 0; p < kTokens * kTopK; ++p) {
      if (where[size_t(p)] != cuda::kCpu) continue;
      const float* gate = weights.data() + size_t(3 * ids[size_t(p)] * kHidden * kIntermediate);
      const float *up = gate + kHidden * kIntermediate, *down = up + kHidden * kIntermediate;
      std::vector<double> h(kIntermediate);
      for (int i = 0; i < kIntermediate; ++i) {
        double g = 0, u = 0;
        for (int c = 0; c < kHidden; ++c) {
          const double x = cuda::float_of_bits(uint32_t(activations[size_t(p / kTopK * kHidden + c)]) << 16);
          g += gate[i * kHidden + c] * x;
          u += up[i * kHidden + c] * x;
        }
        h[size_t(i)] = g / (1 + std::exp(-g)) * u;
      }
      for (int c = 0; c < kHidden; ++c) {
        double y = 0;
        for (int i = 0; i < kIntermediate; ++i) y += down[c * kIntermediate + i] * h[size_t(i)];
        sums[size_t(p / kTopK * kHidden + c)] += double(gates[size_t(p)]) * y;
      }
    }
    return sums;
  }
};

}  // namespace

CASE(only_the_pairs_on_the_cpu_are_computed) {
  Fixture f;
  MailboxExperts experts(f.pool, f.store);
  for (int round = 0; round < 2; ++round) {  // buffers are used again
    f.results.assign(f.results.size(), NAN);
    experts.compute(0, f.posted(), kTopK);
    const std::vector<double> expected = f.expected();
    for (size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(f.results[i] - expected[i]) < 1e-4);
    for (uint8_t& w : f.where) w = uint8_t(f.random() % cuda::kPadding);
  }
}

CASE(a_row_of_padding_names_no_expert) {
  Fixture f;
  MailboxExperts experts(f.pool, f.store);
  for (int k = 0; k < kTopK; ++k) {
    f.ids[size_t(k)] = -1;
    f.where[size_t(k)] = cuda::kPadding;
  }
  experts.compute(0, f.posted(), kTopK);
  for (int c = 0; c < kHidden; ++c) CHECK_EQUAL(f.results[size_t(c)], 0.0f);
}

CASE(an_expert_that_is_not_there_is_refused) {
  Fixture f;
  MailboxExperts experts(f.pool, f.store);
  f.ids[0] = kExperts;
  f.where[0] = cuda::kCpu;
  bool refused = false;
  try {
    experts.compute(0, f.posted(), kTopK);
  } catch (const std::out_of_range&) {
    refused = true;
  }
  CHECK(refused);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
