// Payback: a slot is rented, an upload is bought, and both must pay for themselves.
//
// Every expert is an arm of a restless bandit; residency costs a rent c per event (what the slot could earn
// otherwise) and saves one miss whenever the expert is used. D(s) = value of being resident over being absent,
// from history s on. An absent expert can always be bought at its next use for one miss plus the price r, so
// worth beyond its next use is capped by r; a resident whose worth turns negative frees its slot. Hence, with u
// = used at the next event:
//   D(s) = E[ u ? 1 + min(max(D(s'), 0), r) : max(D(s'), 0) ] - c
// Admit e in place of v if D(e) - D(v) > r; the victim is the resident with the least D. Discounting plain
// future uses instead (D = E[u + gamma V(s')]) ranks victims as well, but overrates the gain of buying now
// over buying later and uploads too much; docs/explanation/scheduling.md has both in figures.
//
// s: age since the last use, usage since the request began, fast usage (about 24 events), long-run usage,
// request just begun or not. D is a table over buckets of s, shared by all layers, learned online by TD(0) from
// every expert of every event (residency does not change how an expert is used). Reads interpolate between the
// buckets of the three usages: buckets are coarse, and the choice between two experts in one bucket would be
// arbitrary. The table starts from the closed form for a constant usage p, which long silence lowers:
//   D = min(1 + r - c/p, (p - c) * kBelievedHorizon), or p - c where p < c.
// The prediction from the experts used by the last event is added to it (payback_context.h). Rents differ by
// layer and load: the table keeps one lane per rent of a fixed ladder and interpolates between two. Each
// layer's own rent follows its market: cheapest victim worth something -> slots are scarce, rent up; worthless
// -> rent down.
#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "payback_context.h"
#include "payback_table.h"
#include "twofold/expert_cache.h"

namespace twofold {
namespace {

using namespace payback;

constexpr float kFastRate = 1.0F / 24;
constexpr float kRequestRate = 1.0F / 128;  // floor of the running mean since the request began
constexpr float kRequestPrior = 16;         // events that the long-run usage counts for in a new request
constexpr float kRequestReversion = 0.8F;   // how far usage falls back to the long run when a request begins
constexpr float kLongRate = 1.0F / 1024;
constexpr float kLongStretch = 1.3F;     // stretches the axis of long-run usages, which ends below 1
constexpr float kNewRequestEvents = 16;  // events
constexpr double kRentRate = 0.03;       // per bid of a layer
constexpr double kPoolRentRate = 0.005;  // per bid of any layer, where all rent from one pool
constexpr double kScarceShare = 0.8;     // target share of bids whose victim still has a positive worth
// Layers learn from a rotating part of their experts: enough, and it bounds the work.
constexpr size_t kLearnedPerEvent = 32;
// Layers without context refresh the cells and worths of this many experts at each event, in turn, and of the
// experts that it uses. Every event moves all usages and ages. Refreshing all cost four times as much with 512
// experts (docs/notebook/scheduling.md).
constexpr size_t kRefreshedPerEvent = 32;

// Expert histories of all layers, one array per figure so that an event's update runs over plain floats.
struct Histories {
  std::vector<int32_t> age;    // events since the last use
  std::vector<float> request;  // usage since the request began
  std::vector<float> fast;
  std::vector<float> long_run;
  // The three usages as axis positions, and the cell of all four without the request's youth: computed once per
  // event, for reading, for the next event's update and for this event's target.
  std::vector<float> request_place, fast_place, long_place;
  std::vector<int32_t> cell;
};

struct LayerState {
  double rent = 0;
  float events = 1e6F;   // since the request began; a share of it when one of several requests is new
  size_t lane = kLanes;  // index into the ladder where low and high were read; kLanes: not read
};

// Experts of a layer.
struct Part {
  size_t begin, count;
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
  int32_t youth(int layer) const {
    return layers_[static_cast<size_t>(layer)].events < kNewRequestEvents ? 0 : kGrown;
  }
  Part part_of_event() const;
  void find_cells(size_t first, size_t count);
  Table::Pair worth_at(size_t at, int32_t youth_now, size_t lane) const;
  void refresh_worths(const RoutingEvent& event, Part part);
  void observe_chunk(const RoutingEvent& event);
  double rent_of(int layer) const { return layers_[pooled_ ? 0 : static_cast<size_t>(layer)].rent; }
  void learn_context(const RoutingEvent& event, int32_t youth_before, int32_t youth_now);

  size_t num_experts_;
  size_t turns_;  // events until every expert of a layer was refreshed
  double price_;
  bool pooled_;
  std::array<uint8_t, kMaxAge + 1> age_bucket_{};
  Table table_;
  Histories history_;            // [layers * experts]
  std::vector<float> use_;       // 1 for each expert that the current event uses, [experts]
  std::vector<int32_t> before_;  // cells of the layer before the current event, [experts]
  // Worths at the rents around the layer's, [layers * experts]; empty where every event refreshes all.
  std::vector<float> low_, high_;
  Context context_;
  std::vector<float> surprise_;  // worth beyond the table's belief in the current event, [experts]
  int64_t num_steps_ = 0;        // since it was made, of the first layer
  std::vector<LayerState> layers_;
  std::vector<int> last_seen_;
};

Payback::Payback(const CacheConfig& config)
    : num_experts_(static_cast<size_t>(config.num_experts)),
      turns_(num_experts_ > kContextExperts ? num_experts_ / kRefreshedPerEvent : 1),
      price_(config.upload_price),
      pooled_(config.pooled()),
      table_(config.upload_price),
      context_(static_cast<size_t>(config.num_layers), num_experts_, static_cast<size_t>(config.top_k)),
      surprise_(num_experts_, 0),
      last_seen_(num_experts_, 0) {
  int age_at = 0;
  for (int age = 0; age <= kMaxAge; ++age) {
    if (age_at + 1 < kAgeBuckets && age >= kAgeFrom[static_cast<size_t>(age_at) + 1]) ++age_at;
    age_bucket_[static_cast<size_t>(age)] = static_cast<uint8_t>(age_at);
  }
  const double base = static_cast<double>(config.top_k) / config.num_experts;
  LayerState layer;
  // Approximate clearing rents of real routing: the scarcer the slots, the more used the expert at the margin.
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
  for (auto* place : {&history_.request_place, &history_.fast_place, &history_.long_place})
    place->assign(cells, 0);
  history_.cell.assign(cells, 0);
  find_cells(0, cells);
  use_.assign(num_experts_, 0);
  before_.assign(num_experts_, 0);
  if (turns_ > 1) {
    low_.assign(cells, 0);
    high_.assign(cells, 0);
  }
}

Part Payback::part_of_event() const {
  const size_t turn = static_cast<size_t>(num_steps_) % turns_;
  const size_t begin = num_experts_ * turn / turns_;
  return {begin, num_experts_ * (turn + 1) / turns_ - begin};
}

void Payback::find_cells(size_t first, size_t count) {
  const float* request = history_.request.data() + first;
  const float* fast = history_.fast.data() + first;
  const float* long_run = history_.long_run.data() + first;
  const int32_t* age = history_.age.data() + first;
  float* at_request = history_.request_place.data() + first;
  float* at_fast = history_.fast_place.data() + first;
  float* at_long = history_.long_place.data() + first;
  int32_t* cell = history_.cell.data() + first;
  for (size_t i = 0; i < count; ++i) at_request[i] = place<kRequestBuckets>(request[i]);
  for (size_t i = 0; i < count; ++i) at_fast[i] = place<kFastBuckets>(fast[i]);
  for (size_t i = 0; i < count; ++i) at_long[i] = place<kLongBuckets>(long_run[i], kLongStretch);
  for (size_t i = 0; i < count; ++i) {
    cell[i] = static_cast<int32_t>(at_long[i]) * kNextLong +
              age_bucket_[static_cast<size_t>(age[i])] * kNextAge +
              static_cast<int32_t>(at_request[i]) * kNextRequest + static_cast<int32_t>(at_fast[i]);
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
  const int32_t youth_before = youth(event.layer);
  layer.events += 1;
  const int32_t youth_now = youth(event.layer);
  num_steps_ += event.layer == 0;
  const Part part = part_of_event();
  if (turns_ > 1) find_cells(first + part.begin, part.count);  // before this event
  std::copy_n(history_.cell.data() + first + part.begin, part.count, before_.data() + part.begin);

  std::fill(use_.begin(), use_.end(), 0.0F);
  for (int expert : event.active) use_[static_cast<size_t>(expert)] = 1;
  const float* use = use_.data();
  const auto move = [&](std::vector<float>& usages, float rate) {
    float* usage = usages.data() + first;
    for (size_t e = 0; e < num_experts_; ++e) usage[e] += rate * (use[e] - usage[e]);
  };
  move(history_.request, request_rate);
  move(history_.fast, kFastRate);
  move(history_.long_run, kLongRate);
  int32_t* age = history_.age.data() + first;
  for (size_t e = 0; e < num_experts_; ++e) age[e] = std::min(kMaxAge, age[e] + 1);
  for (int expert : event.active) age[expert] = 0;
  find_cells(first + part.begin, part.count);
  if (context_.exists()) learn_context(event, youth_before, youth_now);

  const size_t stride = std::max<size_t>(1, part.count / kLearnedPerEvent);
  const int32_t* after = history_.cell.data() + first;
  for (size_t e = part.begin + static_cast<size_t>(num_steps_) % stride; e < part.begin + part.count;
       e += stride) {
    table_.learn(before_[e] + youth_before, after[e] + youth_now, use[e] > 0);
  }
  if (turns_ > 1) refresh_worths(event, youth_now == youth_before ? part : Part{0, num_experts_});
}

// The cells and worths of an event's experts, and the worths of a part, whose cells are new already. Of all experts
// if the worths are of another lane or from before a prompt or a request.
void Payback::refresh_worths(const RoutingEvent& event, Part part) {
  LayerState& state = layers_[static_cast<size_t>(event.layer)];
  const size_t lane = SlotsAtRent(rent_of(event.layer)).lane;
  const size_t first = static_cast<size_t>(event.layer) * num_experts_;
  const int32_t youth_now = youth(event.layer);
  if (lane != state.lane) part = {0, num_experts_};
  if (part.count == num_experts_) find_cells(first, num_experts_);
  state.lane = lane;
  const auto refresh = [&](size_t at) {
    const Table::Pair worth = worth_at(at, youth_now, lane);
    low_[at] = worth[0];
    high_[at] = worth[1];
  };
  for (size_t e = part.begin; e < part.begin + part.count; ++e) refresh(first + e);
  for (int expert : event.active) {
    find_cells(first + static_cast<size_t>(expert), 1);
    refresh(first + static_cast<size_t>(expert));
  }
}

void Payback::learn_context(const RoutingEvent& event, int32_t youth_before, int32_t youth_now) {
  const auto layer = static_cast<size_t>(event.layer);
  context_.add_event(layer, event.active);
  if (context_.can_learn(layer)) {
    const int32_t* after = history_.cell.data() + layer * num_experts_;
    const float* ahead = context_.ahead().data();
    const SlotsAtRent rent(rent_of(event.layer));
    const float trust = context_.trust();
    for (size_t e = 0; e < num_experts_; ++e) {
      surprise_[e] =
          table_.surprise(before_[e] + youth_before, after[e] + youth_now, use_[e], trust * ahead[e], rent);
    }
    context_.learn(layer, surprise_.data());
  }
  context_.accept(layer);
}

// A prompt's chunk moves the averages as its tokens one by one would; it teaches nothing about the reward of a
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
  find_cells(first, num_experts_);
  layer.lane = kLanes;
  context_.forget(static_cast<size_t>(event.layer));
}

Table::Pair Payback::worth_at(size_t at, int32_t youth_now, size_t lane) const {
  const Between<kRequestBuckets> request(history_.request_place[at]);
  const Between<kFastBuckets> fast(history_.fast_place[at]);
  const Between<kLongBuckets> long_run(history_.long_place[at]);
  const int corner = youth_now + long_run.below * kNextLong +
                     age_bucket_[static_cast<size_t>(history_.age[at])] * kNextAge +
                     request.below * kNextRequest + fast.below;
  return table_.read(corner, request.past, fast.past, long_run.past, lane);
}

void Payback::values(int layer, std::span<double> out) const {
  const SlotsAtRent rent(rent_of(layer));
  const size_t first = static_cast<size_t>(layer) * num_experts_;
  if (layers_[static_cast<size_t>(layer)].lane == rent.lane) {
    const float* low = low_.data() + first;
    const float* high = high_.data() + first;
    for (size_t e = 0; e < num_experts_; ++e)
      out[e] = static_cast<double>(low[e] + rent.past * (high[e] - low[e]));
    return;
  }
  const float trust = context_.trust();
  const float* context = context_.worth(static_cast<size_t>(layer));
  const int32_t youth_now = youth(layer);
  for (size_t expert = 0; expert < num_experts_; ++expert) {
    const Table::Pair worth = worth_at(first + expert, youth_now, rent.lane);
    out[expert] = static_cast<double>(worth[0] + rent.past * (worth[1] - worth[0]) + trust * context[expert]);
  }
}

bool Payback::admits(int layer, int expert, double value, int victim, double victim_value) const {
  if (victim >= 0) return value - victim_value > price_;
  // A free slot earns nothing otherwise: the lowest rent.
  const size_t at = static_cast<size_t>(layer) * num_experts_ + static_cast<size_t>(expert);
  const Table::Cell& cell = table_.cells()[static_cast<size_t>(history_.cell[at] + youth(layer))];
  return static_cast<double>(cell.worth.front()) > price_;
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
  find_cells(0, history_.cell.size());
  for (LayerState& layer : layers_) {
    layer.events *= 1 - static_cast<float>(share);
    layer.lane = kLanes;
  }
  if (share < 1) return;
  for (size_t layer = 0; layer < layers_.size(); ++layer) context_.forget(layer);
}

std::vector<double> Payback::state() const {
  std::vector<double> out;
  out.reserve(kCells * (kLanes + 1) + layers_.size() * 2 + history_.age.size() * 4 + context_.state_size());
  for (const Table::Cell& cell : table_.cells()) {
    out.insert(out.end(), cell.worth.begin(), cell.worth.end());
    out.push_back(static_cast<double>(cell.visits));
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
  context_.save(out);
  return out;
}

void Payback::restore(std::span<const double> state) {
  const size_t expected = kCells * (kLanes + 1) + layers_.size() * 2 + history_.age.size() * 4;
  const bool has_context = state.size() == expected + context_.state_size();
  // Earlier versions saved none, or rows of layers that are now too wide for them.
  const size_t wide_rows = layers_.size() * num_experts_ * num_experts_ + 2;
  const bool has_old_rows = !context_.exists() && state.size() == expected + wide_rows;
  if (!has_context && !has_old_rows && state.size() != expected) {
    throw std::runtime_error("payback: saved state of " + std::to_string(state.size()) + " values given, " +
                             std::to_string(expected + context_.state_size()) + " expected");
  }
  const double* at = state.data();
  for (Table::Cell& cell : table_.cells()) {
    for (float& worth : cell.worth) worth = static_cast<float>(*at++);
    cell.visits = static_cast<float>(*at++);
  }
  for (LayerState& layer : layers_) {
    layer.rent = std::clamp(*at++, static_cast<double>(kRents.front()), static_cast<double>(kRents.back()));
    layer.events = static_cast<float>(std::max(0.0, *at++));
    layer.lane = kLanes;
  }
  const auto usage = [&at] { return static_cast<float>(std::clamp(*at++, 0.0, 1.0)); };
  for (size_t i = 0; i < history_.age.size(); ++i) {
    history_.age[i] = static_cast<int32_t>(std::clamp(*at++, 0.0, static_cast<double>(kMaxAge)));
    history_.request[i] = usage();
    history_.fast[i] = usage();
    history_.long_run[i] = usage();
  }
  find_cells(0, history_.cell.size());
  context_.restore(has_context ? state.subspan(expected) : std::span<const double>());
}

}  // namespace

std::unique_ptr<CachePolicy> make_payback(const CacheConfig& config) {
  return std::make_unique<Payback>(config);
}

}  // namespace twofold
