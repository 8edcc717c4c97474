// Offline bounds that know the future. They decide as an online policy would, after an event's whole routing of
// the layer.
#include <limits>
#include <stdexcept>

#include "twofold/expert_cache.h"

namespace twofold {
namespace {

constexpr double kDiscount = 0.98;  // per event, as in payback

// Walks the uses of every (layer, expert) as events pass.
class OfflinePolicy : public CachePolicy {
 public:
  explicit OfflinePolicy(const CacheConfig& config)
      : num_experts_(static_cast<size_t>(config.num_experts)),
        name_(config.policy),
        price_(config.upload_price),
        uses_(static_cast<size_t>(config.num_layers) * num_experts_),
        next_(uses_.size(), 0),
        clock_(static_cast<size_t>(config.num_layers), -1) {}

  void set_future(const std::vector<std::vector<std::vector<int>>>& events_per_layer) override {
    for (auto& uses : uses_) uses.clear();
    for (size_t layer = 0; layer < events_per_layer.size(); ++layer) {
      for (size_t t = 0; t < events_per_layer[layer].size(); ++t) {
        for (int expert : events_per_layer[layer][t]) {
          if (expert < 0 || static_cast<size_t>(expert) >= num_experts_) {
            throw std::invalid_argument("cache policy: future names expert " + std::to_string(expert) +
                                        ", 0 ... " + std::to_string(num_experts_ - 1) + " expected");
          }
          uses_[layer * num_experts_ + static_cast<size_t>(expert)].push_back(static_cast<int64_t>(t));
        }
      }
    }
    next_.assign(uses_.size(), 0);
    clock_.assign(clock_.size(), -1);
    has_future_ = true;
    prepare();
  }

  void observe(const RoutingEvent& event) override {
    if (!has_future_) {
      throw std::invalid_argument("cache policy: " + name_ +
                                  " is an offline bound and needs set_future before the first event");
    }
    const auto layer = static_cast<size_t>(event.layer);
    const int64_t now = ++clock_[layer];
    for (size_t cell = layer * num_experts_; cell < (layer + 1) * num_experts_; ++cell) {
      while (next_[cell] < uses_[cell].size() && uses_[cell][next_[cell]] <= now) ++next_[cell];
    }
  }

 protected:
  virtual void prepare() {}
  // Events until the next use, from the event just seen; infinity if there is none.
  double distance(size_t layer, size_t cell) const {
    if (next_[cell] >= uses_[cell].size()) return std::numeric_limits<double>::infinity();
    return static_cast<double>(uses_[cell][next_[cell]] - clock_[layer]);
  }

  size_t num_experts_;
  std::string name_;
  double price_;
  std::vector<std::vector<int64_t>> uses_;
  std::vector<size_t> next_;
  std::vector<int64_t> clock_;
  bool has_future_ = false;
};

// Evicts the furthest next use; a miss that is needed later than every resident is not admitted.
class Belady : public OfflinePolicy {
 public:
  using OfflinePolicy::OfflinePolicy;

  void values(int layer, std::span<double> out) const override {
    const size_t first = static_cast<size_t>(layer) * num_experts_;
    for (size_t expert = 0; expert < num_experts_; ++expert) {
      out[expert] = -distance(static_cast<size_t>(layer), first + expert);
    }
  }
  bool admits(int, int, double value, int victim, double victim_value) const override {
    return victim < 0 || value > victim_value;
  }
};

// Payback's rule with the true discounted future uses in place of an estimate.
class OraclePayback : public OfflinePolicy {
 public:
  using OfflinePolicy::OfflinePolicy;

  void values(int layer, std::span<double> out) const override;
  bool admits(int, int, double value, int, double victim_value) const override {
    return value - victim_value > price_;
  }

 protected:
  void prepare() override;

 private:
  std::vector<std::vector<double>> from_use_;  // 1 + discounted uses after it, per use
};

void OraclePayback::prepare() {
  from_use_.assign(uses_.size(), {});
  for (size_t cell = 0; cell < uses_.size(); ++cell) {
    auto& sums = from_use_[cell];
    sums.assign(uses_[cell].size(), 1.0);
    for (size_t i = sums.size(); i-- > 1;) {
      double decay = 1;
      for (int64_t gap = uses_[cell][i] - uses_[cell][i - 1]; gap > 0 && decay > 1e-12; --gap)
        decay *= kDiscount;
      sums[i - 1] = 1 + decay * sums[i];
    }
  }
}

void OraclePayback::values(int layer, std::span<double> out) const {
  const size_t first = static_cast<size_t>(layer) * num_experts_;
  for (size_t expert = 0; expert < num_experts_; ++expert) {
    const size_t cell = first + expert;
    double gap = distance(static_cast<size_t>(layer), cell);
    double decay = 1;
    for (; gap > 1 && decay > 1e-12; --gap) decay *= kDiscount;
    out[expert] = next_[cell] < uses_[cell].size() ? decay * from_use_[cell][next_[cell]] : 0;
  }
}

}  // namespace

std::unique_ptr<CachePolicy> make_belady(const CacheConfig& config) {
  return std::make_unique<Belady>(config);
}
std::unique_ptr<CachePolicy> make_oracle_payback(const CacheConfig& config) {
  return std::make_unique<OraclePayback>(config);
}

}  // namespace twofold
