// What a layer scheduler is asked about a layer, and what it decides.
#pragma once

#include <twofold/placement.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "twofold/cost_model.h"
#include "twofold/expert_cache.h"
#include "twofold/link.h"

namespace twofold {

// Telemetry stores the numbers, so they must not change.
enum class UploadReason : uint8_t { kDemand = 0, kAdmission = 1, kPrefetch = 2 };

constexpr UploadLane lane_of(UploadReason reason) {
  return reason == UploadReason::kDemand ? UploadLane::kDemand : UploadLane::kBackground;
}

// One layer's routing: ids[num_tokens * top_k]; weights the same shape or empty.
struct RoutedLayer {
  int layer = 0;
  std::span<const int32_t> ids;
  std::span<const float> weights;
  int num_tokens = 0;

  int top_k() const { return static_cast<int>(ids.size()) / num_tokens; }
};

// One active expert of the layer and where it runs. slot is -1 on the CPU.
struct ExpertDecision {
  int expert = 0;
  int tokens = 0;
  Placement where = Placement::kCpu;
  int slot = -1;
  bool landed = false;  // fetched ahead and already there
  int device = 0;       // that runs it; 0 on the CPU
};

// A device's uploads for the layer, as indices into its experts.
struct DeviceShare {
  std::vector<int> begun;     // uploads ahead that have begun and not landed
  std::vector<int> fetch;     // uploads to begin now, in order
  bool one_transfer = false;  // these are one copy
};

// One upload that the layer began or queued, in link order; belongs to the next layer if it was begun ahead.
struct Move {
  int layer = 0;
  int expert = 0;
  int slot = 0;
  int evicted = -1;        // expert that lost the slot, -1 if it was free or staging
  int evicted_layer = -1;  // another layer's, in a shared pool
  bool staged = false;
  UploadReason reason = UploadReason::kDemand;
  double value = 0;
  double victim_value = 0;
  int device = 0;
  double queued_us = 0;
  double begin_us = -1;  // known at once for demand uploads on a virtual clock, else once it has landed
  double end_us = -1;

  void take(const Admission& admission) {
    slot = admission.slot;
    evicted = admission.evicted;
    evicted_layer = admission.evicted_layer;
    value = admission.value;
    victim_value = admission.victim_value;
  }
};

// A miss whose upload the cache rejected as not worth its price.
struct Rejection {
  int expert = 0;
  double value = 0;
  int device = 0;
};

// An upload that has ended. Its expert is usable from now on, unless it only passed through a staging slot or
// its copy failed.
struct Publication {
  int layer = 0;
  int expert = 0;
  int slot = 0;
  Upload upload;
  bool staged = false;
  int device = 0;
  int left_device = -1;  // whose copy it replaces, from this slot; -1: none
  int left_slot = -1;
};

struct LayerDecision {
  int layer = 0;
  std::vector<ExpertDecision> experts;  // ascending
  std::span<const uint8_t> deferred;    // per routed pair (Deferral); empty: none
  std::vector<Move> moves;
  std::optional<Rejection> rejection;  // the most valuable one: if its upload does not pay, none does
  std::vector<Publication> arrivals;   // uploads ahead and prefetches that ended in time for this layer
  std::vector<int> withdrawn;          // experts whose prefetch, a move of an earlier decision, never began
  LayerTimes times;
  double start_us = 0;

  void begin(int of_layer, double now_us);
  // Adds an upload into a slot for a later step of this layer or, prefetched, for a later layer.
  Move& add_move(int of_layer, int expert, int device, const Admission& admission, UploadReason reason);
  ExpertDecision* find(int expert);  // null: no token is routed to it
};

}  // namespace twofold
