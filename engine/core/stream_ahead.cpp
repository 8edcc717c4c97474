#include "twofold/stream_ahead.h"

#include <algorithm>
#include <cmath>

#include "twofold/reject.h"

namespace twofold {

namespace {

// An expert with this many expected tokens gets none in one chunk of fifty, if tokens choose independently.
constexpr double kSureTokens = 4;
// Weight of the newest chunk in the expected shares.
constexpr float kNewest = 0.5f;

}  // namespace

StreamAhead::StreamAhead(int num_layers, int num_experts, int top_k, int fewest_tokens)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      top_k_(top_k),
      fewest_tokens_(fewest_tokens),
      shares_(static_cast<size_t>(num_layers) * static_cast<size_t>(num_experts),
              1.0f / static_cast<float>(num_experts)),
      seen_(static_cast<size_t>(num_layers), 0),
      gaps_(static_cast<size_t>(num_layers)) {
  if (fewest_tokens < 2) {
    reject("StreamAhead: fewest_tokens", fewest_tokens, ">= 2 (a single token's layer is not streamed)");
  }
}

void StreamAhead::begin_step() {
  held_.clear();
  next_.clear();
  last_layer_ = -1;
}

void StreamAhead::begin_layer(int layer, Link& link, std::vector<Upload>& arrivals) {
  if (last_layer_ >= 0 && layer == last_layer_ + 1) {
    gaps_[static_cast<size_t>(layer)] = {std::max(0.0, link.now_us() - last_end_us_), last_tokens_};
  }
  last_layer_ = -1;
  held_.clear();
  for (Expert& ahead : next_) {
    if (ahead.what.layer != layer) continue;  // left by an aborted step
    if (const auto upload = link.take_if_landed(ahead.what)) {
      arrivals.push_back(*upload);
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

void StreamAhead::refused(int slot) {
  std::erase_if(next_, [slot](const Expert& ahead) { return ahead.what.slot == slot; });
}

std::vector<int> StreamAhead::choose(int layer, int num_tokens, const LayerWork& work,
                                     const LayerTimes& times, const CostModel& cost,
                                     const PrefillPlanner& planner, ExpertCache& cache, const Link& link,
                                     int num_free) {
  const int next = layer + 1;
  if (next >= num_layers_ || num_tokens < fewest_tokens_ || num_free < 1) return {};
  if (cache.config().pin(next) == LayerPin::kNever) return {};
  // Until the next layer begins, less the link's earlier work.
  const Gap& gap = gaps_[static_cast<size_t>(next)];
  const double gap_us = gap.us * std::min(1.0, static_cast<double>(num_tokens) / gap.num_tokens);
  const double room_us = times.layer_us + gap_us - link.backlog_us();
  int most = static_cast<int>(std::min(std::floor(room_us / link.upload_us()), double(num_free)));
  if (most < 1) return {};

  std::vector<ExpertLoad> expected;
  for (int expert = 0; expert < num_experts_; ++expert) {
    const double tokens = double(share(next, expert)) * num_tokens * top_k_;
    const ExpertState state = cache.state(next, expert);
    if (tokens < kSureTokens || state == ExpertState::kInFlight) continue;
    expected.push_back({expert, static_cast<int>(std::lround(tokens)), state == ExpertState::kResident});
  }
  std::vector<int> chosen = planner.plan(expected, 0, 0, -1).fetch;
  // While the cache has free slots, fetched experts fill those.
  std::erase_if(chosen, [&](int expert) {
    const auto possible = cache.can_admit(next, expert, true);
    return possible && possible->evicted < 0;
  });
  most = std::min(most, static_cast<int>(chosen.size()));
  // The CPU computes while they travel; it must not finish later because of them.
  for (; most > 0; --most) {
    LayerWork slowed = work;
    slowed.queued_us = std::max(work.queued_us, work.backlog_us) + most * link.upload_us();
    if (cost.layer(slowed).layer_us <= times.layer_us * (1 + 1e-12)) break;
  }
  chosen.resize(static_cast<size_t>(most));
  return chosen;
}

void StreamAhead::observe(int layer, std::span<const int> experts, std::span<const int> loads, int num_tokens,
                          double end_us) {
  last_layer_ = layer;
  last_tokens_ = num_tokens;
  last_end_us_ = end_us;
  if (num_tokens < fewest_tokens_) return;
  char& seen = seen_[static_cast<size_t>(layer)];
  const float newest = seen ? kNewest : 1.0f;
  seen = 1;
  for (int expert = 0; expert < num_experts_; ++expert) share(layer, expert) *= 1 - newest;
  const float pairs = static_cast<float>(num_tokens) * static_cast<float>(top_k_);
  for (size_t i = 0; i < experts.size(); ++i)
    share(layer, experts[i]) += newest * static_cast<float>(loads[i]) / pairs;
}

}  // namespace twofold
