// Shape, slots, policy and rules of a layer scheduler.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "twofold/cost_model.h"
#include "twofold/expert_cache.h"
#include "twofold/fetch_rules.h"
#include "twofold/scheduler_options.h"

namespace twofold {

struct LayerSchedulerConfig {
  int num_layers = 0;
  int num_experts = 0;
  int top_k = 0;
  std::vector<int> slots = {0};  // each device has so many

#define TWOFOLD_OPTION_MEMBER(type, name, otherwise, range, help) type name = otherwise;
  TWOFOLD_SCHEDULER_OPTIONS(TWOFOLD_OPTION_MEMBER)
#undef TWOFOLD_OPTION_MEMBER

  int num_devices() const { return static_cast<int>(slots.size()); }
  int home(int layer) const { return homes.empty() ? 0 : homes[static_cast<size_t>(layer)]; }
  // Sizes for memory allocation.
  int usable_slots(int device) const {
    const auto never = static_cast<int>(std::count(pins.begin(), pins.end(), LayerPin::kNever));
    return std::min(slots[static_cast<size_t>(device)], (num_layers - never) * num_experts);
  }
  int staging_slots() const { return num_staging < 0 ? num_experts : num_staging; }
  // Throws std::invalid_argument where an option is out of range, or it does not describe a machine of so many
  // devices and links.
  void validate(int devices, size_t num_links) const;
};

// Cost of a background upload to the layers it overlaps, in misses: the contention it causes on the CPU.
double default_upload_price(const DeviceCost& cost);
// The cache of a device's slots. Pinned layers are resident on their home alone.
std::unique_ptr<ExpertCache> make_cache(const CostModel& cost, const LayerSchedulerConfig& config,
                                        int device);

}  // namespace twofold
