// What the executor reports of its decisions: fixed-size records that cross to Python as numpy structured
// arrays.
// `*_us` of uploads and cache events are microseconds of the run's clock since its start; `request` is -1
// where none applies.
#pragma once
#include <cstdint>

#include "twofold/layer_scheduler.h"

namespace twofold {

inline constexpr int kMaxRouted = 16;  // largest top-k that a TokenLayerEvent can describe

// One token in one MoE layer: which experts it was routed to and where each ran.
struct TokenLayerEvent {
  int64_t step;
  int64_t request;
  int32_t position;
  int16_t layer;
  uint8_t num_routed;
  uint8_t num_hits;
  uint8_t num_cpu;
  uint8_t num_fetched;
  uint16_t experts[kMaxRouted];
  uint8_t placement[kMaxRouted];  // Placement
  float weights[kMaxRouted];
  float layer_us;      // the layer's experts, all tokens of the step, on the run's clock
  float cpu_us;        // the CPU's share of it
  float gpu_us;        // the accelerator's share of it
  float predicted_us;  // the cost model's prediction; 0 without an accelerator
};

// One expert copied from host memory into a slot.
struct UploadEvent {
  int64_t step;
  int64_t request;
  int16_t layer;
  uint16_t expert;
  int32_t slot;
  int64_t bytes;
  double queued_us;
  double begin_us;
  double end_us;
  uint8_t reason;  // UploadReason
  uint8_t lane;
};

enum class CacheEventKind : uint8_t { kAdmit = 0, kEvict = 1, kReject = 2, kPublish = 3 };

// One change of, or refusal by, the expert cache.
struct CacheEvent {
  int64_t step;
  int64_t request;
  int16_t layer;
  uint8_t kind;  // CacheEventKind
  uint16_t expert;
  int32_t victim;  // expert that lost its slot, -1 for none
  int32_t slot;    // -1 for none
  float value;
  float victim_value;
  float price;
  double at_us;
};

}  // namespace twofold
