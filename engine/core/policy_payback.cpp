// Payback: an expert is worth the discounted number of uses to come, an upload is made when it will pay for
// itself.
//
// V is a table over three features of an expert's own history (age since its last use, a slow and a fast EWMA
// of its usage), shared by all layers and learned online by TD(0): after each event every expert of the layer
// has moved from cell s to cell s', and V(s) follows the mean over the event of  r + gamma V(s') - V(s)  with
// r = 1 if it was used.
#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "policies.h"
#include "twofold/expert_cache.h"

namespace twofold {
namespace {

constexpr double kDiscount = 0.98;
constexpr double kSlowRate = 1.0 / 96;
constexpr double kFastRate = 1.0 / 8;
constexpr int kAgeBuckets = 23;
constexpr int kSlowBuckets = 16;
constexpr int kFastBuckets = 8;
constexpr int kMaxAge = 512;
constexpr size_t kCells = static_cast<size_t>(kAgeBuckets) * kSlowBuckets * kFastBuckets;

// Ages 0..7 one by one, then about half-octave steps up to 512.
std::array<uint8_t, kMaxAge + 1> age_buckets() {
  constexpr std::array<int, kAgeBuckets> kFirst{0,  1,  2,  3,  4,  5,  6,   7,   8,   10,  12, 16,
                                                20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512};
  std::array<uint8_t, kMaxAge + 1> out{};
  int bucket = 0;
  for (int age = 0; age <= kMaxAge; ++age) {
    while (bucket + 1 < kAgeBuckets && age >= kFirst[static_cast<size_t>(bucket) + 1]) ++bucket;
    out[static_cast<size_t>(age)] = static_cast<uint8_t>(bucket);
  }
  return out;
}

int ewma_bucket(float usage, int buckets) {
  // Square root: resolution where most experts are.
  return std::min(buckets - 1, static_cast<int>(std::sqrt(usage) * static_cast<float>(buckets)));
}

struct History {
  int32_t age = kMaxAge;
  float slow = 0;
  float fast = 0;
  int32_t cell = -1;
};

class Payback : public CachePolicy {
 public:
  explicit Payback(const CacheConfig& config)
      : num_experts_(static_cast<size_t>(config.num_experts)),
        price_(config.upload_price),
        age_bucket_(age_buckets()),
        table_(kCells, 0),
        error_(kCells, 0),
        visits_(kCells, 0) {
    const double base = static_cast<double>(config.top_k) / config.num_experts;
    History fresh;
    fresh.slow = static_cast<float>(base);
    history_.assign(static_cast<size_t>(config.num_layers) * num_experts_, fresh);
    // Until it has learned, the table believes each cell's own slow usage.
    for (int age = 0; age < kAgeBuckets; ++age) {
      for (int slow = 0; slow < kSlowBuckets; ++slow) {
        for (int fast = 0; fast < kFastBuckets; ++fast) {
          const double usage = std::pow((slow + 0.5) / kSlowBuckets, 2);
          table_[cell(age, slow, fast)] = usage / (1 - kDiscount);
        }
      }
    }
    for (History& h : history_) h.cell = static_cast<int32_t>(cell_of(h));
  }

  void observe(const RoutingEvent& event) override {
    History* layer = history_.data() + static_cast<size_t>(event.layer) * num_experts_;
    touched_.clear();
    size_t next_active = 0;
    for (size_t expert = 0; expert < num_experts_; ++expert) {
      const bool used =
          next_active < event.active.size() && static_cast<size_t>(event.active[next_active]) == expert;
      double share = 0;
      if (used) {
        share = event.prefill ? static_cast<double>(event.loads[next_active]) / event.num_tokens : 1.0;
        ++next_active;
      }
      History& h = layer[expert];
      const auto before = static_cast<size_t>(h.cell);
      step(h, used, share, event.prefill ? event.num_tokens : 1);
      const auto after = static_cast<size_t>(h.cell);
      if (event.prefill) continue;  // a chunk says nothing about the next token's reward
      if (visits_[before]++ == 0) touched_.push_back(before);
      error_[before] += (used ? 1.0 : 0.0) + kDiscount * table_[after] - table_[before];
    }
    for (size_t touched : touched_) {
      const double visits = visits_[touched];
      table_[touched] += std::min(0.3, 0.03 * std::sqrt(visits)) * error_[touched] / visits;
      error_[touched] = 0;
      visits_[touched] = 0;
    }
  }

  void values(int layer, std::span<double> out) const override {
    const History* history = history_.data() + static_cast<size_t>(layer) * num_experts_;
    for (size_t expert = 0; expert < num_experts_; ++expert) {
      out[expert] = table_[static_cast<size_t>(history[expert].cell)];
    }
  }

  bool admits(int, int, double value, int, double victim_value) const override {
    return value - victim_value > price_;
  }

  std::vector<double> state() const override {
    std::vector<double> out(table_);
    for (const History& h : history_) {
      out.push_back(h.age);
      out.push_back(static_cast<double>(h.slow));
      out.push_back(static_cast<double>(h.fast));
    }
    return out;
  }

  void restore(std::span<const double> state) override {
    if (state.size() != kCells + 3 * history_.size()) {
      throw std::runtime_error("payback: saved state of " + std::to_string(state.size()) + " values given, " +
                               std::to_string(kCells + 3 * history_.size()) + " expected");
    }
    std::copy_n(state.begin(), kCells, table_.begin());
    size_t at = kCells;
    for (History& h : history_) {
      h.age = static_cast<int32_t>(std::clamp(state[at], 0.0, static_cast<double>(kMaxAge)));
      h.slow = static_cast<float>(std::clamp(state[at + 1], 0.0, 1.0));
      h.fast = static_cast<float>(std::clamp(state[at + 2], 0.0, 1.0));
      at += 3;
      h.cell = static_cast<int32_t>(cell_of(h));
    }
  }

 private:
  static size_t cell(int age, int slow, int fast) {
    return (static_cast<size_t>(age) * kSlowBuckets + static_cast<size_t>(slow)) * kFastBuckets +
           static_cast<size_t>(fast);
  }
  size_t cell_of(const History& h) const {
    return cell(age_bucket_[static_cast<size_t>(h.age)], ewma_bucket(h.slow, kSlowBuckets),
                ewma_bucket(h.fast, kFastBuckets));
  }

  // share: use per token; a chunk of n tokens ages the averages n times at its mean usage.
  void step(History& h, bool used, double share, int tokens) {
    const double keep_slow = tokens == 1 ? 1 - kSlowRate : std::pow(1 - kSlowRate, tokens);
    const double keep_fast = tokens == 1 ? 1 - kFastRate : std::pow(1 - kFastRate, tokens);
    h.slow = static_cast<float>(keep_slow * static_cast<double>(h.slow) + (1 - keep_slow) * share);
    h.fast = static_cast<float>(keep_fast * static_cast<double>(h.fast) + (1 - keep_fast) * share);
    h.age = used ? 0 : std::min(kMaxAge, h.age + tokens);
    h.cell = static_cast<int32_t>(cell_of(h));
  }

  size_t num_experts_;
  double price_;
  std::array<uint8_t, kMaxAge + 1> age_bucket_;
  std::vector<double> table_;
  std::vector<double> error_;
  std::vector<int> visits_;
  std::vector<size_t> touched_;
  std::vector<History> history_;
};

}  // namespace

std::unique_ptr<CachePolicy> make_payback(const CacheConfig& config) {
  return std::make_unique<Payback>(config);
}

}  // namespace twofold
