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

namespace twofold {

struct LayerSchedulerConfig {
  int num_layers = 0;
  int num_experts = 0;
  int top_k = 0;
  std::vector<int> slots = {0};  // each device has so many
  std::string policy = "payback";
  int num_staging = -1;          // each device has so many; -1: num_experts, room to stream one whole layer
  double upload_price = -1;      // in misses; < 0: default_upload_price
  int max_waiting_uploads = 16;  // maximum queued background uploads; keeps slots from idling in flight
  int stream_ahead_from = 33;    // tokens of a step from which the next layer is uploaded ahead; 0: never
  // The remaining fields describe other engines for comparison; the defaults are Twofold's.
  FetchRule fetch_rule = FetchRule::kBestSplit;
  bool background_uploads = true;     // misses run by the CPU may be uploaded after the layer
  bool always_cache_fetched = false;  // a fetched expert always takes a slot, whatever its value
  std::optional<bool> shared_pool;    // unset: the policy's default (CacheConfig)
  bool prefetch = false;              // upload ahead the experts that `predict` predicts
  bool fixed_placement = false;       // slots keep their initial experts: misses never take one
  int replace_from = 0;               // prompt tokens of a step from which it replaces residents by its own
                                      // routing and in the same pass; 0: never
  int num_deferred = 0;               // maximum deferred experts per token and layer (Deferral)
  double cache_prior = 0;             // preference for residents when experts are chosen (ops/router.h)
  std::vector<double> prior_usage;    // [layers * experts]: for `static` and for preload_by_usage

  std::vector<LayerPin> pins;  // one per layer, or none: all are free
  std::vector<int> homes;      // per layer, the device with its other weights; empty: device 0

  int num_devices() const { return static_cast<int>(slots.size()); }
  int home(int layer) const { return homes.empty() ? 0 : homes[static_cast<size_t>(layer)]; }
  // Sizes for memory allocation.
  int usable_slots(int device) const {
    const auto never = static_cast<int>(std::count(pins.begin(), pins.end(), LayerPin::kNever));
    return std::min(slots[static_cast<size_t>(device)], (num_layers - never) * num_experts);
  }
  int staging_slots() const { return num_staging < 0 ? num_experts : num_staging; }
  // Throws std::invalid_argument where it does not describe a machine of so many devices and links.
  void validate(int devices, size_t num_links) const;
};

// Cost of a background upload to the layers it overlaps, in misses: the contention it causes on the CPU.
double default_upload_price(const DeviceCost& cost);
// The cache of a device's slots. Pinned layers are resident on their home alone.
std::unique_ptr<ExpertCache> make_cache(const CostModel& cost, const LayerSchedulerConfig& config,
                                        int device);

}  // namespace twofold
