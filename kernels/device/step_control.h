// A decode step's bookkeeping on the device: steps are counted, routed pairs are grouped by expert and posted
// to the CPU, answers are waited for. Plain C++ launchers.
#pragma once
#include <cstdint>

#include "expert_layer.h"
#include "mailbox_layout.h"
#include "read_choice.h"

namespace twofold::cuda {

// Inputs of the device's placement of a layer's experts. Device memory unless said otherwise.
struct PlacementTables {
  const int32_t* slots;  // [experts] the layer's published slots, -1: absent
  const uint8_t* split;  // one token: [hits][misses], side (top_k + 1); null: nothing is read from the host
  uint64_t slot_base;    // address of slot 0
  int64_t slot_stride;   // bytes
  uint64_t store_base;   // device address of the mapped store, 0: not mapped
  const int64_t* store_offsets;  // [experts] bytes from there to each expert of the layer; null: not mapped
  int num_experts;
  const ReadPrices* prices = nullptr;  // several tokens; null: nothing is read from the host
  const uint8_t* kinds = nullptr;      // [experts] number of each one's layout; null: all have the same
  int num_kinds = 1;
};

// The groups of one kind of a layer's experts (PlacementTables::kinds). The arrays of the kinds lie one after the
// other; pairs are shared.
TWOFOLD_HD ExpertGroups groups_of_kind(const ExpertGroups& first, int kind) {
  return {first.num_groups + kind, first.weights + int64_t{kind} * first.capacity,
          first.begin + int64_t{kind} * (first.capacity + 1), first.pairs, first.capacity};
}

// What one layer's routing becomes.
struct PlacedLayer {
  ExpertGroups groups;   // those of the first kind, see groups_of_kind
  uint8_t* where;        // [pairs], see placement.h
  uint32_t* num_on_cpu;  // [1]
};

struct RoutedLayer {
  const int32_t* ids;    // [tokens][top_k]; all of a token's below 0: a row of padding
  const float* weights;  // [tokens][top_k]
  const void* normed;    // bf16 [tokens][hidden]
  int num_tokens;
  int layer;
  const float* ahead = nullptr;  // [tokens][experts] by the next layer's router; null: it was not asked
};

// What the launchers take; anything else is cudaErrorInvalidValue.
inline bool can_place(const RoutedLayer& routed, const PlacementTables& tables, const PlacedLayer& placed,
                      const MailboxShape& shape, const void* mailbox, const uint32_t* step) {
  return routed.num_tokens >= 1 && routed.num_tokens <= shape.max_tokens && routed.layer >= 0 &&
         routed.layer < shape.num_layers && tables.num_experts >= 1 && shape.hidden % 8 == 0 &&
         placed.groups.capacity >= max_groups(routed.num_tokens * shape.top_k, tables.num_experts) &&
         (tables.store_base == 0 || tables.store_offsets != nullptr) &&
         (tables.num_kinds == 1 || (tables.num_kinds > 1 && tables.kinds != nullptr)) &&
         (tables.prices == nullptr || routed.num_tokens <= kMostReadTokens) &&
         (shape.num_ahead == 0 || shape.num_ahead == tables.num_experts) &&
         (routed.ahead == nullptr || shape.num_ahead > 0) && (mailbox == nullptr || step != nullptr);
}
inline bool can_wait(const MailboxShape& shape, const void* mailbox, int layer, const uint32_t* step,
                     const uint32_t* num_on_cpu, int64_t limit_ns) {
  return mailbox != nullptr && step != nullptr && num_on_cpu != nullptr && layer >= 0 &&
         layer < shape.num_layers && limit_ns >= 1;
}

// ++*step. The first node of a step's graph; *step begins at 0 and then numbers the steps from 1.
int launch_begin_step(uint32_t* step, Stream stream);

// Groups the layer's pairs and posts it. mailbox is the device's address of the mapped memory; null: nothing
// is posted, absent experts are only marked.
int launch_place(const RoutedLayer& routed, const PlacementTables& tables, const PlacedLayer& placed,
                 const MailboxShape& shape, void* mailbox, const uint32_t* step, Stream stream);

// Waits for the answer if a pair of the layer is on the CPU; ends early when the host aborts, and after
// limit_ns with MailboxReport::timed_out set. Never hangs.
int launch_wait(const MailboxShape& shape, void* mailbox, int layer, const uint32_t* step,
                const uint32_t* num_on_cpu, int64_t limit_ns, Stream stream);

}  // namespace twofold::cuda
