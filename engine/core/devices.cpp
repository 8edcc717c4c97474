#include "twofold/devices.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace twofold {

Devices::Devices(const CostModel& cost, const LayerSchedulerConfig& config, std::span<Link* const> links)
    : num_staging_(config.staging_slots()) {
  config.validate(cost.num_devices(), links.size());
  for (Link* link : links) devices_.push_back({link, make_cache(cost, config, count())});
}

void Devices::observe(const RoutedLayer& routed, const StepShape& shape) {
  const auto& prompt_rows = shape.prefill_rows;
  if (!prompt_rows.empty() && prompt_rows.size() != static_cast<size_t>(routed.num_tokens)) {
    throw std::invalid_argument("layer scheduler: " + std::to_string(routed.num_tokens) +
                                " tokens given, the step's " + std::to_string(prompt_rows.size()) +
                                " expected");
  }
  for (Device& device : devices_) {
    if (prompt_rows.empty()) {
      device.cache->observe(routed.layer, routed.ids, routed.weights, routed.num_tokens);
    } else {
      device.cache->observe_mixed(routed.layer, routed.ids, routed.weights, prompt_rows);
    }
  }
}

bool Devices::holds(int layer, int expert, int except) const {
  for (int d = 0; d < count(); ++d) {
    if (d != except && cache(d).slot_of(layer, expert) >= 0) return true;
  }
  return false;
}

Devices::SlotOutcome Devices::slot_outcome_of(int layer, int expert, int device) const {
  const auto possible = cache(device).can_admit(layer, expert, true);
  if (!possible) return SlotOutcome::kPasses;
  if (possible->evicted < 0) return SlotOutcome::kFree;
  return possible->value > possible->victim_value ? SlotOutcome::kReplaces : SlotOutcome::kPasses;
}

bool Devices::is_resident_anywhere(int layer, int expert) const {
  return std::any_of(devices_.begin(), devices_.end(), [layer, expert](const Device& device) {
    return device.cache->is_resident(layer, expert);
  });
}

ExpertLoad Devices::load_of(int layer, int expert, int tokens) const {
  ExpertLoad load{expert, tokens};
  for (int d = 0; d < count(); ++d) {
    const ExpertState state = cache(d).state(layer, expert);
    if (state == ExpertState::kResident) load.resident |= 1U << d;
    // Not through a staging slot either.
    if (state == ExpertState::kInFlight || cache(d).config().pin(layer) == LayerPin::kNever)
      load.barred |= 1U << d;
  }
  return load;
}

void Devices::advance(double us) {
  for (Device& device : devices_) device.link->advance(us);
}

void Devices::drain() {
  double end_us = 0;
  for (Device& device : devices_) {
    device.link->drain();
    end_us = std::max(end_us, device.link->now_us());
  }
  for (Device& device : devices_) device.link->advance(std::max(0.0, end_us - device.link->now_us()));
}

void Devices::upload(Move& move, double duration_us) {
  const Upload upload =
      link(move.device).upload({move.layer, move.expert, move.slot}, lane_of(move.reason), duration_us);
  move.queued_us = upload.queued_us;
  move.begin_us = upload.begin_us;
  move.end_us = upload.end_us;
}

}  // namespace twofold
