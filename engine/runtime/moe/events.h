// What the executor reports of its decisions: fixed-size records that cross to Python as numpy structured
// arrays. A field is declared here alone: the array's dtype, the database's column and its documentation follow.
#pragma once
#include <cstdint>

#include "twofold/layer_scheduler.h"

namespace twofold {

inline constexpr int kMaxRouted = 16;  // largest top-k that a TokenLayerEvent can describe

// X(type, name, extent of an array or nothing, meaning). One token in one MoE layer: which experts it was routed to
// and where each ran. Times are the whole layer's in that step, the same for every token of the batch.
#define TWOFOLD_TOKEN_LAYER_FIELDS(X)                                               \
  X(int64_t, step, , "")                                                            \
  X(int64_t, request, , "-1: none")                                                 \
  X(int32_t, position, , "")                                                        \
  X(int16_t, layer, , "counts MoE layers")                                          \
  X(uint8_t, num_routed, , "")                                                      \
  X(uint8_t, num_hits, , "")                                                        \
  X(uint8_t, num_cpu, , "")                                                         \
  X(uint8_t, num_fetched, , "")                                                     \
  X(uint16_t, experts, [kMaxRouted], "uint16[num_routed], descending weight")       \
  X(uint8_t, placement, [kMaxRouted], "uint8[num_routed]: 0 hit, 1 cpu, 2 fetched") \
  X(float, weights, [kMaxRouted], "float32[num_routed]")                            \
  X(uint8_t, devices, [kMaxRouted], "uint8[num_routed]: device that ran it")        \
  X(float, layer_us, , "the layer's experts, all tokens of the step")               \
  X(float, cpu_us, , "the CPU's share of layer_us")                                 \
  X(float, gpu_us, , "the accelerator's share of layer_us")                         \
  X(float, predicted_us, , "the cost model's prediction; 0 without an accelerator")

// One expert copied from host memory into a slot.
#define TWOFOLD_UPLOAD_FIELDS(X)                            \
  X(int64_t, step, , "")                                    \
  X(int64_t, request, , "-1: none")                         \
  X(int16_t, layer, , "counts MoE layers")                  \
  X(uint16_t, expert, , "")                                 \
  X(int32_t, slot, , "")                                    \
  X(int64_t, size_bytes, , "")                              \
  X(double, queued_us, , "run clock since its start")       \
  X(double, begin_us, , "run clock since its start")        \
  X(double, end_us, , "run clock since its start")          \
  X(uint8_t, reason, , "0 demand, 1 admission, 2 prefetch") \
  X(uint8_t, lane, , "0 demand, 1 background")              \
  X(uint8_t, device, , "that the slot belongs to")

enum class CacheEventKind : uint8_t { kAdmit = 0, kEvict = 1, kReject = 2, kPublish = 3 };

// One change of, or refusal by, the expert cache.
#define TWOFOLD_CACHE_EVENT_FIELDS(X)                         \
  X(int64_t, step, , "")                                      \
  X(int64_t, request, , "-1: none")                           \
  X(int16_t, layer, , "counts MoE layers")                    \
  X(uint8_t, kind, , "0 admit, 1 evict, 2 reject, 3 publish") \
  X(uint16_t, expert, , "")                                   \
  X(int32_t, victim, , "expert that lost its slot, -1: none") \
  X(int32_t, slot, , "-1: none")                              \
  X(float, value, , "of the expert, in the policy's unit")    \
  X(float, victim_value, , "of the victim")                   \
  X(float, price, , "of the upload, in the same unit")        \
  X(double, at_us, , "run clock since its start")             \
  X(uint8_t, device, , "that the slot belongs to")

#define TWOFOLD_EVENT_MEMBER(type, name, extent, meaning) type name extent;

struct TokenLayerEvent {
  TWOFOLD_TOKEN_LAYER_FIELDS(TWOFOLD_EVENT_MEMBER)
};

struct UploadEvent {
  TWOFOLD_UPLOAD_FIELDS(TWOFOLD_EVENT_MEMBER)
};

struct CacheEvent {
  TWOFOLD_CACHE_EVENT_FIELDS(TWOFOLD_EVENT_MEMBER)
};

}  // namespace twofold
