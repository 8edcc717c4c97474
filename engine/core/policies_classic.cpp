// Baseline policies, of other engines and textbooks. All but two-in-eight, half-lru and static admit every
// miss.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "twofold/expert_cache.h"

namespace twofold {
namespace {

// Per (layer, expert) numbers, and clocks that count events.
class ClassicPolicy : public CachePolicy {
 public:
  explicit ClassicPolicy(const CacheConfig& config)
      : num_experts_(static_cast<size_t>(config.num_experts)),
        score_(static_cast<size_t>(config.num_layers) * num_experts_, 0),
        layer_clock_(static_cast<size_t>(config.num_layers), 0) {}

  void observe(const RoutingEvent& event) override {
    ++clock_;
    ++layer_clock_[static_cast<size_t>(event.layer)];
    update(event, std::span(score_).subspan(static_cast<size_t>(event.layer) * num_experts_, num_experts_));
  }

  void values(int layer, std::span<double> out) const override {
    const auto first =
        score_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(layer) * num_experts_);
    std::copy_n(first, num_experts_, out.begin());
  }

  bool admits(int, int, double, int, double) const override { return true; }

 protected:
  virtual void update(const RoutingEvent& event, std::span<double> score) = 0;
  double now() const { return static_cast<double>(clock_); }
  double now(int layer) const { return static_cast<double>(layer_clock_[static_cast<size_t>(layer)]); }

  size_t num_experts_;
  std::vector<double> score_;

 private:
  int64_t clock_ = 0;
  std::vector<int64_t> layer_clock_;
};

// Least recently used.
class Lru : public ClassicPolicy {
 public:
  using ClassicPolicy::ClassicPolicy;

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    for (int expert : event.active) score[static_cast<size_t>(expert)] = now();
  }
};

// Least frequently used, counted since start.
class Lfu : public ClassicPolicy {
 public:
  using ClassicPolicy::ClassicPolicy;

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    for (int expert : event.active) score[static_cast<size_t>(expert)] += 1;
  }
};

// Frequency over age: uses since start / events since the last use.
class Lfru : public ClassicPolicy {
 public:
  explicit Lfru(const CacheConfig& config) : ClassicPolicy(config), last_(score_.size(), 0) {}

  void values(int layer, std::span<double> out) const override {
    const size_t first = static_cast<size_t>(layer) * num_experts_;
    for (size_t expert = 0; expert < num_experts_; ++expert) {
      out[expert] = score_[first + expert] / (now(layer) - last_[first + expert] + 1);
    }
  }

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    const size_t first = static_cast<size_t>(event.layer) * num_experts_;
    for (int expert : event.active) {
      score[static_cast<size_t>(expert)] += 1;
      last_[first + static_cast<size_t>(expert)] = now(event.layer);
    }
  }

 private:
  std::vector<double> last_;
};

// HybriMoE's minus-recent-score (arXiv 2504.05897): S <- alpha * TopP(s) + (1 - alpha) * S, with the router's
// scores s. A decode trace holds the top-k scores only, so TopP keeps those.
class Mrs : public ClassicPolicy {
 public:
  using ClassicPolicy::ClassicPolicy;

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    for (double& s : score) s *= 1 - kAlpha;
    const double share = kAlpha / std::max(1, event.num_tokens);
    for (size_t i = 0; i < event.ids.size(); ++i) {
      const double weight = event.weights.empty() ? 1.0 / event.top_k : static_cast<double>(event.weights[i]);
      score[static_cast<size_t>(event.ids[i])] += share * weight;
    }
  }

 private:
  static constexpr double kAlpha = 0.1;
};

// LRU whose gate opens at the second use within eight events of the layer.
class TwoInEight : public ClassicPolicy {
 public:
  explicit TwoInEight(const CacheConfig& config)
      : ClassicPolicy(config), last_(score_.size(), kNever), previous_(score_.size(), kNever) {}

  bool admits(int layer, int expert, double, int, double) const override {
    const size_t cell = static_cast<size_t>(layer) * num_experts_ + static_cast<size_t>(expert);
    return last_[cell] - previous_[cell] < kWindow;
  }

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    const size_t first = static_cast<size_t>(event.layer) * num_experts_;
    for (int expert : event.active) {
      const size_t cell = first + static_cast<size_t>(expert);
      score[static_cast<size_t>(expert)] = now();
      previous_[cell] = last_[cell];
      last_[cell] = now(event.layer);
    }
  }

 private:
  static constexpr double kNever = -1e18;
  static constexpr double kWindow = 8;
  std::vector<double> last_, previous_;
};

// llama.cpp's expert cache as described: uses with a half-life of 128 events, in classes of powers of two. The
// lowest class leaves first, in it the least recently used.
class FrequencyLru : public ClassicPolicy {
 public:
  explicit FrequencyLru(const CacheConfig& config) : ClassicPolicy(config), last_(score_.size(), 0) {}

  void values(int layer, std::span<double> out) const override {
    const size_t first = static_cast<size_t>(layer) * num_experts_;
    for (size_t expert = 0; expert < num_experts_; ++expert) {
      out[expert] = std::floor(std::log2(1 + score_[first + expert])) * kClass + last_[first + expert];
    }
  }

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    static const double kept = std::exp2(-1.0 / kHalfLife);
    const size_t first = static_cast<size_t>(event.layer) * num_experts_;
    for (double& uses : score) uses *= kept;
    for (int expert : event.active) {
      score[static_cast<size_t>(expert)] += 1;
      last_[first + static_cast<size_t>(expert)] = now();
    }
  }

 private:
  static constexpr double kHalfLife = 128;
  static constexpr double kClass = 1LL << 40;  // above every clock, far below what a double counts exactly
  std::vector<double> last_;
};

// Half of the slots belong permanently to the most used experts of prior usage, over all layers; the rest are
// LRU. Without prior usage, all are.
class PinnedLru : public Lru {
 public:
  explicit PinnedLru(const CacheConfig& config) : Lru(config), pinned_(score_.size(), 0) {
    if (config.prior_usage.empty()) return;
    std::vector<size_t> order(score_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return config.prior_usage[a] > config.prior_usage[b]; });
    const int slots = std::accumulate(config.slots_per_layer.begin(), config.slots_per_layer.end(), 0);
    order.resize(std::min(order.size(), static_cast<size_t>(slots / 2)));
    for (size_t cell : order) pinned_[cell] = 1;
  }

  void values(int layer, std::span<double> out) const override {
    Lru::values(layer, out);
    const size_t first = static_cast<size_t>(layer) * num_experts_;
    for (size_t expert = 0; expert < num_experts_; ++expert) {
      if (pinned_[first + expert]) out[expert] = std::numeric_limits<double>::infinity();  // never a victim
    }
  }

 private:
  std::vector<uint8_t> pinned_;
};

// Admits a fixed share of the misses, whatever their value, over LRU: FreeToken's rule where link and CPU are
// equally fast. The draw is made at each use, so that a query and its decision agree.
class HalfLru : public Lru {
 public:
  explicit HalfLru(const CacheConfig& config) : Lru(config), admitted_(score_.size(), 0) {}

  bool admits(int layer, int expert, double, int, double) const override {
    return admitted_[static_cast<size_t>(layer) * num_experts_ + static_cast<size_t>(expert)] != 0;
  }

 protected:
  void update(const RoutingEvent& event, std::span<double> score) override {
    Lru::update(event, score);
    const size_t first = static_cast<size_t>(event.layer) * num_experts_;
    for (int expert : event.active) {
      drawn_ = drawn_ * 6364136223846793005ULL + 1442695040888963407ULL;
      admitted_[first + static_cast<size_t>(expert)] = static_cast<uint8_t>(drawn_ >> 63);
    }
  }

 private:
  std::vector<uint8_t> admitted_;
  uint64_t drawn_ = 42;
};

// Keeps the most used experts of prior usage; nothing is ever replaced. Free slots take the first misses.
class Static : public ClassicPolicy {
 public:
  explicit Static(const CacheConfig& config) : ClassicPolicy(config) {
    if (!config.prior_usage.empty()) score_ = config.prior_usage;
  }

  bool admits(int, int, double, int victim, double) const override { return victim < 0; }

 protected:
  void update(const RoutingEvent&, std::span<double>) override {}
};

}  // namespace

std::unique_ptr<CachePolicy> make_lru(const CacheConfig& config) { return std::make_unique<Lru>(config); }
std::unique_ptr<CachePolicy> make_lfu(const CacheConfig& config) { return std::make_unique<Lfu>(config); }
std::unique_ptr<CachePolicy> make_lfru(const CacheConfig& config) { return std::make_unique<Lfru>(config); }
std::unique_ptr<CachePolicy> make_mrs(const CacheConfig& config) { return std::make_unique<Mrs>(config); }
std::unique_ptr<CachePolicy> make_two_in_eight(const CacheConfig& config) {
  return std::make_unique<TwoInEight>(config);
}
std::unique_ptr<CachePolicy> make_frequency_lru(const CacheConfig& config) {
  return std::make_unique<FrequencyLru>(config);
}
std::unique_ptr<CachePolicy> make_pinned_lru(const CacheConfig& config) {
  return std::make_unique<PinnedLru>(config);
}
std::unique_ptr<CachePolicy> make_half_lru(const CacheConfig& config) {
  return std::make_unique<HalfLru>(config);
}
std::unique_ptr<CachePolicy> make_static(const CacheConfig& config) {
  return std::make_unique<Static>(config);
}

}  // namespace twofold
