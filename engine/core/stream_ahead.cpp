#include "twofold/stream_ahead.h"

#include <algorithm>
#include <cmath>

#include "twofold/layer_planner.h"
#include "twofold/reject.h"

namespace twofold {

namespace {

// An expert with this many expected tokens gets none in one chunk of fifty, if tokens choose independently.
constexpr double kSureTokens = 4;
// Weight of the newest chunk in the expected shares.
constexpr float kNewest = 0.5f;

}  // namespace

StreamAhead::StreamAhead(const LayerSchedulerConfig& config)
    : num_layers_(config.num_layers),
      num_experts_(config.num_experts),
      top_k_(config.top_k),
      fewest_tokens_(config.stream_ahead_from),
      is_on_(fewest_tokens_ > 0 && config.fetch_rule == FetchRule::kBestSplit && config.staging_slots() > 0),
      shares_(static_cast<size_t>(num_layers_) * static_cast<size_t>(num_experts_),
              1.0f / static_cast<float>(num_experts_)),
      seen_(static_cast<size_t>(num_layers_), 0),
      gaps_(static_cast<size_t>(num_layers_)) {
  if (is_on_ && fewest_tokens_ < 2) {
    reject("StreamAhead: fewest_tokens", fewest_tokens_, ">= 2 (a single token's layer is not streamed)");
  }
}

void StreamAhead::begin_step() {
  held_.clear();
  next_.clear();
  last_layer_ = -1;
}

void StreamAhead::begin_layer(int layer, Devices& devices, std::vector<Publication>& arrivals) {
  if (last_layer_ >= 0 && layer == last_layer_ + 1) {
    gaps_[static_cast<size_t>(layer)] = {std::max(0.0, devices.now_us() - last_end_us_), last_tokens_};
  }
  last_layer_ = -1;
  held_.clear();
  for (Expert& ahead : next_) {
    if (ahead.what.layer != layer) continue;  // left by an aborted step
    if (const auto upload = devices.link(ahead.device).take_if_landed(ahead.what)) {
      devices.count_copied(*upload);
      arrivals.push_back({ahead.what.layer, ahead.what.expert, ahead.what.slot, *upload, true, ahead.device});
      if (upload->failed) continue;
      ahead.landed = true;
    }
    held_.push_back(ahead);
  }
  next_.clear();
}

const StreamAhead::Expert* StreamAhead::find(int expert) const {
  const auto found = std::find_if(held_.begin(), held_.end(),
                                  [expert](const Expert& ahead) { return ahead.what.expert == expert; });
  return found == held_.end() ? nullptr : &*found;
}

void StreamAhead::refused(int device, int slot) {
  std::erase_if(next_, [device, slot](const Expert& ahead) {
    return ahead.device == device && ahead.what.slot == slot;
  });
}

void StreamAhead::upload(const RoutedLayer& routed, const LayerPlanner& planner, LayerPricer& pricer,
                         Devices& devices, LayerDecision& decision) {
  choose(routed, planner, pricer, decision, devices);
  for (const Expert& chosen : next_) {
    Move& move = decision.moves.emplace_back();
    move.layer = chosen.what.layer;
    move.expert = chosen.what.expert;
    move.slot = chosen.what.slot;
    move.device = chosen.device;
    move.staged = true;
    devices.upload(move);
  }
  // The CPU's experts may take longer, the layer does not.
  if (!next_.empty()) decision.times = planner.cost(routed.layer).layer(pricer.work());
  observe(routed, devices, decision.start_us + decision.times.layer_us);
}

void StreamAhead::choose(const RoutedLayer& routed, const LayerPlanner& planner, LayerPricer& pricer,
                         const LayerDecision& decision, const Devices& devices) {
  next_.clear();
  const int next = routed.layer + 1;
  if (!is_on_ || next >= num_layers_ || routed.num_tokens < fewest_tokens_) return;
  // Until the next layer begins, less the links' earlier work.
  const Gap& gap = gaps_[static_cast<size_t>(next)];
  const double room_us = decision.times.layer_us +
                         gap.us * std::min(1.0, static_cast<double>(routed.num_tokens) / gap.num_tokens);
  std::vector<int> most;
  for (int d = 0; d < devices.count(); ++d) {
    const Link& link = devices.link(d);
    most.push_back(static_cast<int>(std::floor((room_us - link.backlog_us()) / link.upload_us())));
  }
  if (*std::max_element(most.begin(), most.end()) < 1) return;
  const std::vector<DeviceLane> plans = expected_plan(next, routed.num_tokens, planner, devices);
  for (int d = 0; d < devices.count(); ++d) {
    std::vector<int> experts = plans[static_cast<size_t>(d)].fetch;
    // While the cache has free slots, fetched experts fill those.
    std::erase_if(experts, [&](int expert) {
      const auto possible = devices.cache(d).can_admit(next, expert, true);
      return possible && possible->evicted < 0;
    });
    if (const auto limit = static_cast<size_t>(std::max(0, most[static_cast<size_t>(d)]));
        limit < experts.size())
      experts.resize(limit);
    choose_for(d, routed.layer, experts, pricer, planner.cost(routed.layer), decision, devices);
  }
}

std::vector<DeviceLane> StreamAhead::expected_plan(int next, int num_tokens, const LayerPlanner& planner,
                                                   const Devices& devices) {
  std::vector<ExpertLoad> expected;
  for (int expert = 0; expert < num_experts_; ++expert) {
    const double tokens = double(share(next, expert)) * num_tokens * top_k_;
    if (tokens >= kSureTokens)
      expected.push_back(devices.load_of(next, expert, static_cast<int>(std::lround(tokens))));
  }
  const std::vector<DeviceState> idle(static_cast<size_t>(devices.count()));
  return planner.planner(next).plan(expected, {.devices = idle}, true).devices;
}

void StreamAhead::choose_for(int device, int layer, std::span<const int> experts, LayerPricer& pricer,
                             const CostModel& cost, const LayerDecision& decision, const Devices& devices) {
  std::vector<int> free;  // staging slots that hold no expert of this layer
  const int num_slots = devices.num_slots(device);
  for (int slot = num_slots; slot < num_slots + devices.num_staging(); ++slot) {
    if (std::none_of(decision.experts.begin(), decision.experts.end(),
                     [&](const ExpertDecision& e) { return e.slot == slot && e.device == device; }))
      free.push_back(slot);
  }
  // The CPU computes while they travel; it must not finish later because of them.
  DeviceWork& work = pricer.of_devices()[static_cast<size_t>(device)];
  const double queued_us = work.queued_us, upload_us = devices.link(device).upload_us();
  size_t most = std::min(free.size(), experts.size());
  for (; most > 0; --most) {
    work.queued_us = std::max(queued_us, work.backlog_us) + static_cast<double>(most) * upload_us;
    if (cost.layer(pricer.work()).layer_us <= decision.times.layer_us * (1 + 1e-12)) break;
  }
  if (most == 0) work.queued_us = queued_us;
  for (size_t n = 0; n < most; ++n) {
    next_.push_back({{layer + 1, experts[n], free[n]}, device, false});
  }
}

void StreamAhead::observe(const RoutedLayer& routed, const Devices& devices, double end_us) {
  const int layer = routed.layer, num_tokens = routed.num_tokens;
  last_layer_ = layer;
  last_tokens_ = num_tokens;
  last_end_us_ = end_us;
  if (!is_on_ || num_tokens < fewest_tokens_) return;
  char& seen = seen_[static_cast<size_t>(layer)];
  const float newest = seen ? kNewest : 1.0f;
  seen = 1;
  for (int expert = 0; expert < num_experts_; ++expert) share(layer, expert) *= 1 - newest;
  const float pairs = static_cast<float>(num_tokens) * static_cast<float>(top_k_);
  const auto experts = devices.active(layer), loads = devices.loads(layer);
  for (size_t i = 0; i < experts.size(); ++i)
    share(layer, experts[i]) += newest * static_cast<float>(loads[i]) / pairs;
}

}  // namespace twofold
