// Where fetched experts land. They need a slot: an expert with a higher value than the cheapest victim takes that
// slot (the upload is paid anyway); any other passes through a staging slot, which the next layer may overwrite.
#pragma once

#include <optional>
#include <vector>

#include "twofold/devices.h"
#include "twofold/dynamic_update.h"

namespace twofold {

class SlotPlacer {
 public:
  explicit SlotPlacer(const LayerSchedulerConfig& config)
      : always_keeps_(config.always_cache_fetched), never_keeps_(config.fixed_placement) {}

  // Gives every expert to be fetched its slot, and adds the moves to the decision, in the links' order.
  void place(std::span<const DeviceShare> shares, Devices& devices, DynamicUpdate& update,
             LayerDecision& decision) const;
  // Passes the decision's moves to the links.
  void upload(std::span<const DeviceShare> shares, const CostModel& cost, Devices& devices,
              LayerDecision& decision) const;

 private:
  // Whether it stays in a slot. One that another device holds only passes through.
  bool keeps(const LayerDecision& decision, const Move& move, const Devices& devices,
             const std::optional<Admission>& possible) const;

  bool always_keeps_, never_keeps_;
};

}  // namespace twofold
