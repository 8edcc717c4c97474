// Payback: a slot is rented, an upload is bought, and both must pay for themselves.
//
// Every expert is an arm of a restless bandit; residency costs a rent c per event (what the slot could earn
// otherwise) and saves one miss whenever the expert is used. D(s) = what being resident is worth over being
// absent, from history s on. An absent expert can always be bought at its next use for one miss plus the
// price r, so worth beyond its next use is capped by r; a resident one whose worth turns negative gives its
// slot up. Hence, with u = used at the next event:
//   D(s) = E[ u ? 1 + min(max(D(s'), 0), r) : max(D(s'), 0) ] - c
// Admit e in place of v if D(e) - D(v) > r; the victim is the resident with the least D. Discounting plain
// future uses instead (D = E[u + gamma V(s')]) ranks victims as well, but overrates the gain of buying now
// over buying later and uploads too much; docs/scheduling.md has both in figures.
//
// s: age since the last use, usage since the request began, fast usage (about 24 events), long-run usage,
// request just begun or not. D is a table over buckets of s, shared by all layers, learned online by TD(0)
// from every expert of every event (being resident or not does not change how an expert is used), and read
// between the buckets of the three usages: they are coarse, and which of two experts in one bucket leaves would
// be chance. It starts from the closed form for a constant usage p, which long silence lowers:
//   D = min(1 + r - c/p, (p - c) * kBelievedHorizon), or p - c where p < c.
// Rents differ by layer and load: the table keeps one lane per rent of a fixed ladder and reads between two.
// Each layer's own rent follows its market: cheapest victim worth something -> slots are scarce, rent up;
// worthless -> rent down.
#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "twofold/expert_cache.h"

namespace twofold {
namespace {

constexpr int kLanes = 12;
// About the usage per event of the expert that a slot more would hold: 0.1 % where slots are many to 95 %
// where a batch uses nearly every expert and slots are few.
constexpr std::array<float, kLanes> kRents{0.001F, 0.004F, 0.01F, 0.02F, 0.04F, 0.08F,
                                           0.16F,  0.27F,  0.4F,  0.55F, 0.75F, 0.95F};
constexpr float kDiscount = 0.998F;      // per event; rent and cap bound D, this only damps errors
constexpr double kBelievedHorizon = 50;  // events that an untaught usage is trusted for
constexpr float kFastRate = 1.0F / 24;
constexpr float kRequestRate = 1.0F / 128;  // floor of the running mean since the request began
constexpr float kRequestPrior = 16;         // events that the long-run usage counts for in a new request
constexpr float kRequestReversion = 0.8F;   // how far usage falls back to the long run when a request begins
constexpr float kLongRate = 1.0F / 1024;
constexpr float kYoungRequest = 16;  // events
constexpr float kMinStep = 0.01F;
constexpr float kStepVisits = 20;        // step = 1 / (1 + visits / this), not below kMinStep
constexpr double kRentRate = 0.03;       // per bid of a layer
constexpr double kPoolRentRate = 0.005;  // per bid of any layer, where all rent from one pool
constexpr double kScarceShare = 0.8;     // of bids should meet a victim that is still worth something
constexpr size_t kTaughtPerEvent =
    32;  // wide layers teach from a rotating part of their experts: enough, and it bounds the work
constexpr int kMaxAge = 512;
constexpr int kAgeBuckets = 16;
constexpr std::array<int, kAgeBuckets> kAgeFrom{0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512};
constexpr int kRequestBuckets = 12;
constexpr int kFastBuckets = 8;
constexpr int kLongBuckets = 8;
constexpr int kYouthBuckets = 2;
// From a cell to the one of the next long-run usage.
constexpr size_t kNextLong = static_cast<size_t>(kAgeBuckets) * kRequestBuckets * kFastBuckets;
constexpr size_t kCells =
    static_cast<size_t>(kYouthBuckets) * kLongBuckets * kAgeBuckets * kRequestBuckets * kFastBuckets;

// Expert histories of all layers, one array per figure so that an event's update runs over plain floats.
struct Histories {
  std::vector<int32_t> age;    // events since the last use
  std::vector<float> request;  // usage since the request began
  std::vector<float> fast;
  std::vector<float> long_run;
};

struct LayerState {
  double rent = 0;
  float events = 1e6F;  // since the request began; a share of it when one of several requests is new
};

// Usage 0 ... 1 -> bucket, by square root: resolution where most experts are.
class Buckets {
 public:
  Buckets(int count, double stretch)
      : scale_(static_cast<float>(stretch * count)),
        end_(std::nextafter(static_cast<float>(count - 1), 0.0F)) {
    for (int i = 0; i <= kSteps; ++i) {
      const double usage = (i + 0.5) / kSteps;
      of_[static_cast<size_t>(i)] =
          static_cast<uint8_t>(std::min(count - 1, static_cast<int>(std::sqrt(usage) * stretch * count)));
    }
  }
  int operator()(float usage) const { return of_[static_cast<size_t>(usage * kSteps)]; }
  // Where usages lie between the middles of buckets: the whole part is the bucket below, the rest how far the
  // next one is.
  void place(std::span<const float> usage, std::span<float> out) const {
    for (size_t i = 0; i < usage.size(); ++i) {
      const float x = std::sqrt(usage[i]) * scale_ - 0.5F;
      out[i] = std::min(std::max(x, 0.0F), end_);
    }
  }

 private:
  static constexpr int kSteps = 4096;
  float scale_;
  float end_;  // of the last bucket but one, so that there is always a next
  std::array<uint8_t, kSteps + 1> of_{};
};

class Payback : public CachePolicy {
 public:
  explicit Payback(const CacheConfig& config);
  void observe(const RoutingEvent& event) override;
  void values(int layer, std::span<double> out) const override;
  bool admits(int layer, int expert, double value, int victim, double victim_value) const override;
  void on_bid(int layer, int victim, double victim_value) override;
  void on_boundary(double share) override;
  std::vector<double> state() const override;
  void restore(std::span<const double> state) override;

 private:
  using Worth = std::array<float, kLanes>;

  static size_t cell(int youth, int long_run, int age, int request, int fast) {
    return static_cast<size_t>(
        (((youth * kLongBuckets + long_run) * kAgeBuckets + age) * kRequestBuckets + request) * kFastBuckets +
        fast);
  }
  size_t cell_of(size_t at, int youth) const {
    return cell(youth, long_buckets_(history_.long_run[at]),
                age_bucket_[static_cast<size_t>(history_.age[at])], request_buckets_(history_.request[at]),
                fast_buckets_(history_.fast[at]));
  }
  static int youth(const LayerState& layer) { return layer.events < kYoungRequest ? 0 : 1; }
  void believe_constant_usage();
  void learn(size_t before, size_t after, bool used);
  void observe_chunk(const RoutingEvent& event);
  double rent_of(int layer) const { return layers_[pooled_ ? 0 : static_cast<size_t>(layer)].rent; }

  size_t num_experts_;
  double price_;
  bool pooled_;
  std::array<uint8_t, kMaxAge + 1> age_bucket_{};
  std::vector<Worth> worth_;
  std::vector<float> visits_;
  Buckets request_buckets_{kRequestBuckets, 1}, fast_buckets_{kFastBuckets, 1},
      long_buckets_{kLongBuckets, 1.3};
  Histories history_;                  // [layers * experts]
  std::vector<float> use_;             // of the current event, [experts]
  mutable std::vector<float> places_;  // scratch of values(), [3 * experts]
  std::vector<size_t> before_;         // cells of the experts that the current event teaches from
  size_t stride_;
  size_t num_events_ = 0;
  std::vector<LayerState> layers_;
  std::vector<int> last_seen_;
};

Payback::Payback(const CacheConfig& config)
    : num_experts_(static_cast<size_t>(config.num_experts)),
      price_(config.upload_price),
      pooled_(config.pooled()),
      worth_(kCells),
      visits_(kCells, 0),
      last_seen_(num_experts_, 0) {
  int age_at = 0;
  for (int age = 0; age <= kMaxAge; ++age) {
    if (age_at + 1 < kAgeBuckets && age >= kAgeFrom[static_cast<size_t>(age_at) + 1]) ++age_at;
    age_bucket_[static_cast<size_t>(age)] = static_cast<uint8_t>(age_at);
  }
  believe_constant_usage();
  const double base = static_cast<double>(config.top_k) / config.num_experts;
  LayerState layer;
  // Where markets of real routing clear, roughly: the scarcer the slots, the more used the expert at the
  // margin.
  double free_share = 1;
  for (int slots : config.slots_per_layer)
    free_share -= slots / (static_cast<double>(config.num_layers) * config.num_experts);
  const double scarcity = 1.6 * base * std::sqrt(std::max(0.0, free_share));
  layer.rent = std::clamp(scarcity, static_cast<double>(kRents.front()), static_cast<double>(kRents.back()));
  layers_.assign(static_cast<size_t>(config.num_layers), layer);
  const size_t cells = static_cast<size_t>(config.num_layers) * num_experts_;
  history_.age.assign(cells, kMaxAge);
  for (auto* usage : {&history_.request, &history_.fast, &history_.long_run})
    usage->assign(cells, static_cast<float>(base));
  use_.assign(num_experts_, 0);
  places_.assign(3 * num_experts_, 0);
  stride_ = std::max<size_t>(1, num_experts_ / kTaughtPerEvent);
}

void Payback::believe_constant_usage() {
  for (int age = 0; age < kAgeBuckets; ++age) {
    for (int request = 0; request < kRequestBuckets; ++request) {
      for (int fast = 0; fast < kFastBuckets; ++fast) {
        const double a = std::pow((request + 0.5) / kRequestBuckets, 2);
        const double b = std::pow((fast + 0.5) / kFastBuckets, 2);
        double usage = (a + b) / 2;
        usage *= 2 / (2 + usage * kAgeFrom[static_cast<size_t>(age)]);  // no use for so many events
        Worth worth{};
        for (size_t lane = 0; lane < kLanes; ++lane) {
          const double rent = static_cast<double>(kRents[lane]);
          // Bought back at the next use, or, where the price is never worth it, all uses of the horizon.
          const double bought = 1 + price_ - rent / usage;
          worth[lane] = static_cast<float>(usage > rent ? std::min(bought, (usage - rent) * kBelievedHorizon)
                                                        : usage - rent);
        }
        for (int outer = 0; outer < kYouthBuckets * kLongBuckets; ++outer) {
          worth_[cell(outer / kLongBuckets, outer % kLongBuckets, age, request, fast)] = worth;
        }
      }
    }
  }
}

void Payback::learn(size_t before, size_t after, bool used) {
  Worth& worth = worth_[before];
  const Worth next = worth_[after];
  visits_[before] += 1;
  const float step = std::max(kMinStep, 1 / (1 + visits_[before] / kStepVisits));
  const float cap = static_cast<float>(price_);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const float ahead = std::max(next[lane], 0.0F);
    const float target = kDiscount * (used ? 1 + std::min(ahead, cap) : ahead) - kRents[lane];
    worth[lane] += step * (target - worth[lane]);
  }
}

void Payback::observe(const RoutingEvent& event) {
  if (event.prefill) {
    observe_chunk(event);
    return;
  }
  LayerState& layer = layers_[static_cast<size_t>(event.layer)];
  const float request_rate = std::max(kRequestRate, 1 / (layer.events + kRequestPrior));
  const size_t first = static_cast<size_t>(event.layer) * num_experts_;
  const size_t taught = event.layer == 0 ? ++num_events_ % stride_ : num_events_ % stride_;
  const int youth_before = youth(layer);
  layer.events += 1;
  const int youth_now = youth(layer);
  before_.clear();
  for (size_t e = taught; e < num_experts_; e += stride_) before_.push_back(cell_of(first + e, youth_before));

  std::fill(use_.begin(), use_.end(), 0.0F);
  for (int expert : event.active) use_[static_cast<size_t>(expert)] = 1;
  float* request = history_.request.data() + first;
  float* fast = history_.fast.data() + first;
  float* long_run = history_.long_run.data() + first;
  int32_t* age = history_.age.data() + first;
  for (size_t e = 0; e < num_experts_; ++e) {
    request[e] += request_rate * (use_[e] - request[e]);
    fast[e] += kFastRate * (use_[e] - fast[e]);
    long_run[e] += kLongRate * (use_[e] - long_run[e]);
    age[e] = use_[e] > 0 ? 0 : std::min(kMaxAge, age[e] + 1);
  }
  for (size_t i = 0, e = taught; e < num_experts_; ++i, e += stride_) {
    learn(before_[i], cell_of(first + e, youth_now), use_[e] > 0);
  }
}

// A prompt's chunk moves the averages as its tokens one by one would; it says nothing about the reward of a
// decode step.
void Payback::observe_chunk(const RoutingEvent& event) {
  LayerState& layer = layers_[static_cast<size_t>(event.layer)];
  const auto tokens = static_cast<float>(event.num_tokens);
  const float request_rate =
      std::max(1 - std::pow(1 - kRequestRate, tokens), tokens / (layer.events + kRequestPrior + tokens));
  const float fast_rate = 1 - std::pow(1 - kFastRate, tokens);
  const float long_rate = 1 - std::pow(1 - kLongRate, tokens);
  layer.events += tokens;
  std::fill(last_seen_.begin(), last_seen_.end(), -1);
  for (size_t i = 0; i < event.ids.size(); ++i) {
    last_seen_[static_cast<size_t>(event.ids[i])] = static_cast<int>(i / static_cast<size_t>(event.top_k));
  }
  const size_t first = static_cast<size_t>(event.layer) * num_experts_;
  size_t next_active = 0;
  for (size_t expert = 0; expert < num_experts_; ++expert) {
    const bool used =
        next_active < event.active.size() && static_cast<size_t>(event.active[next_active]) == expert;
    const float use = used ? static_cast<float>(event.loads[next_active]) / tokens : 0.0F;
    next_active += used;
    const size_t at = first + expert;
    history_.request[at] += request_rate * (use - history_.request[at]);
    history_.fast[at] += fast_rate * (use - history_.fast[at]);
    history_.long_run[at] += long_rate * (use - history_.long_run[at]);
    const int ago = used ? event.num_tokens - 1 - last_seen_[expert] : history_.age[at] + event.num_tokens;
    history_.age[at] = std::min(kMaxAge, ago);
  }
}

void Payback::values(int layer, std::span<double> out) const {
  const double rent = rent_of(layer);
  size_t lane = 0;
  while (lane + 2 < kLanes && rent > static_cast<double>(kRents[lane + 1])) ++lane;
  const double low = static_cast<double>(kRents[lane]);
  const double high = static_cast<double>(kRents[lane + 1]);
  const double t = (rent - low) / (high - low);
  const size_t first = static_cast<size_t>(layer) * num_experts_;
  const int youth_now = youth(layers_[static_cast<size_t>(layer)]);
  const std::span<float> request(places_.data(), num_experts_);
  const std::span<float> fast(places_.data() + num_experts_, num_experts_);
  const std::span<float> long_run(places_.data() + 2 * num_experts_, num_experts_);
  request_buckets_.place({history_.request.data() + first, num_experts_}, request);
  fast_buckets_.place({history_.fast.data() + first, num_experts_}, fast);
  long_buckets_.place({history_.long_run.data() + first, num_experts_}, long_run);
  const auto weight = static_cast<float>(t);
  for (size_t expert = 0; expert < num_experts_; ++expert) {
    const int r = static_cast<int>(request[expert]);
    const int f = static_cast<int>(fast[expert]);
    const int l = static_cast<int>(long_run[expert]);
    const float past_r = request[expert] - static_cast<float>(r);
    const float past_f = fast[expert] - static_cast<float>(f);
    const float past_l = long_run[expert] - static_cast<float>(l);
    const int age = age_bucket_[static_cast<size_t>(history_.age[first + expert])];
    const Worth* corner = &worth_[cell(youth_now, l, age, r, f)];
    const auto along_fast = [&](size_t at) {
      const float* near = corner[at].data() + lane;
      const float* far = corner[at + 1].data() + lane;
      const float here = near[0] + past_f * (far[0] - near[0]);
      const float dearer = near[1] + past_f * (far[1] - near[1]);
      return here + weight * (dearer - here);
    };
    const auto along_request = [&](size_t at) {
      const float here = along_fast(at);
      return here + past_r * (along_fast(at + kFastBuckets) - here);
    };
    const float here = along_request(0);
    out[expert] = static_cast<double>(here + past_l * (along_request(kNextLong) - here));
  }
}

bool Payback::admits(int layer, int expert, double value, int victim, double victim_value) const {
  if (victim >= 0) return value - victim_value > price_;
  // A free slot earns nothing otherwise: the lowest rent.
  const size_t at = static_cast<size_t>(layer) * num_experts_ + static_cast<size_t>(expert);
  const Worth& worth = worth_[cell_of(at, youth(layers_[static_cast<size_t>(layer)]))];
  return static_cast<double>(worth.front()) > price_;
}

void Payback::on_bid(int layer, int victim, double victim_value) {
  const double rate = pooled_ ? kPoolRentRate : kRentRate;
  double& rent = layers_[pooled_ ? 0 : static_cast<size_t>(layer)].rent;
  rent *= victim >= 0 && victim_value > 0 ? 1 + rate * (1 - kScarceShare) : 1 - rate * kScarceShare;
  rent = std::clamp(rent, static_cast<double>(kRents.front()), static_cast<double>(kRents.back()));
}

void Payback::on_boundary(double share) {
  const auto reversion = static_cast<float>(share) * kRequestReversion;
  for (size_t at = 0; at < history_.request.size(); ++at) {
    history_.request[at] += reversion * (history_.long_run[at] - history_.request[at]);
  }
  for (LayerState& layer : layers_) layer.events *= 1 - static_cast<float>(share);
}

std::vector<double> Payback::state() const {
  std::vector<double> out;
  out.reserve(kCells * (kLanes + 1) + layers_.size() * 2 + history_.age.size() * 4);
  for (size_t i = 0; i < kCells; ++i) {
    out.insert(out.end(), worth_[i].begin(), worth_[i].end());
    out.push_back(static_cast<double>(visits_[i]));
  }
  for (const LayerState& layer : layers_) {
    out.push_back(layer.rent);
    out.push_back(static_cast<double>(layer.events));
  }
  for (size_t at = 0; at < history_.age.size(); ++at) {
    out.push_back(history_.age[at]);
    out.push_back(static_cast<double>(history_.request[at]));
    out.push_back(static_cast<double>(history_.fast[at]));
    out.push_back(static_cast<double>(history_.long_run[at]));
  }
  return out;
}

void Payback::restore(std::span<const double> state) {
  const size_t expected = kCells * (kLanes + 1) + layers_.size() * 2 + history_.age.size() * 4;
  if (state.size() != expected) {
    throw std::runtime_error("payback: saved state of " + std::to_string(state.size()) + " values given, " +
                             std::to_string(expected) + " expected");
  }
  const double* at = state.data();
  for (size_t i = 0; i < kCells; ++i) {
    for (float& worth : worth_[i]) worth = static_cast<float>(*at++);
    visits_[i] = static_cast<float>(*at++);
  }
  for (LayerState& layer : layers_) {
    layer.rent = std::clamp(*at++, static_cast<double>(kRents.front()), static_cast<double>(kRents.back()));
    layer.events = static_cast<float>(std::max(0.0, *at++));
  }
  const auto usage = [&at] { return static_cast<float>(std::clamp(*at++, 0.0, 1.0)); };
  for (size_t i = 0; i < history_.age.size(); ++i) {
    history_.age[i] = static_cast<int32_t>(std::clamp(*at++, 0.0, static_cast<double>(kMaxAge)));
    history_.request[i] = usage();
    history_.fast[i] = usage();
    history_.long_run[i] = usage();
  }
}

}  // namespace

std::unique_ptr<CachePolicy> make_payback(const CacheConfig& config) {
  return std::make_unique<Payback>(config);
}

}  // namespace twofold
