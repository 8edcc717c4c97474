// Stand-ins, on host memory and on the calling thread, for the kernels that native_table_step launches: its thread
// sanitizer would take the SIMT machine's fibres for one thread, and the kernels' own sources call a sanitizer of their own.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "expert_layer.h"
#include "number_formats.h"
#include "step_control.h"

namespace twofold {

namespace cuda {
namespace {

constexpr int kInvalidValue = 1;

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::atomic_ref<uint32_t> word(uint8_t* mailbox, int64_t at) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(mailbox + at));
}

// For one token: which misses the device reads from the host itself, the best routed first.
void choose_reads_of_token(const int32_t* ids, int top_k, const uint8_t* split, std::vector<uint8_t>& place) {
  if (ids[0] < 0) return;
  int hits = 0;
  for (int k = 0; k < top_k; ++k) hits += place[size_t(ids[k])] == kHit;
  int reads = split[hits * (top_k + 1) + top_k - hits];
  for (int k = 0; k < top_k && reads > 0; ++k) {
    if (place[size_t(ids[k])] != kCpu) continue;
    place[size_t(ids[k])] = kFetched;
    --reads;
  }
}

// For several tokens.
void choose_reads(const int32_t* ids, int num_pairs, const ReadPrices& prices, std::vector<uint8_t>& place) {
  if (prices.reads == 0) return;
  const int num_experts = int(place.size());
  std::vector<int32_t> counts(place.size()), misses(place.size());
  ReadSums sums{};
  for (int e = 0; e < num_experts; ++e) counts[size_t(e)] = count_pairs(ids, num_pairs, e);
  for (int e = 0; e < num_experts; ++e) {
    const int count = counts[size_t(e)];
    if (count == 0) continue;
    if (place[size_t(e)] == kHit) {
      ++sums.num_hits;
      sums.hit_ns += prices.gpu_ns[count];
    } else {
      ++sums.num_misses;
      sums.cpu_ns += prices.cpu_ns[count];
      sums.slowed_ns += prices.slowed_ns[count];
      misses[size_t(misses_before(counts.data(), place.data(), num_experts, e))] = e;
    }
  }
  const int reads = num_reads(misses.data(), counts.data(), sums, prices);
  for (int n = 0; n < reads; ++n) place[size_t(misses[size_t(n)])] = kFetched;
}

}  // namespace

int launch_begin_step(uint32_t* step, Stream) {
  if (step == nullptr) return kInvalidValue;
  *step = next_step(*step);
  return 0;
}

int launch_place(const RoutedLayer& routed, const PlacementTables& tables, const PlacedLayer& placed,
                 const MailboxShape& shape, void* memory, const uint32_t* step, Stream) {
  if (!can_place(routed, tables, placed, shape, memory, step)) return kInvalidValue;
  const int64_t begin_ns = nanoseconds();
  const int top_k = shape.top_k, num_pairs = routed.num_tokens * top_k;
  uint8_t* mailbox = static_cast<uint8_t*>(memory);
  const MailboxLayout layout{shape};
  const bool looks = memory != nullptr && shape.num_ahead > 0;
  std::vector<int32_t> slots(tables.slots, tables.slots + tables.num_experts);
  std::vector<uint8_t> place(slots.size());
  for (int e = 0; e < tables.num_experts; ++e) {
    int32_t& slot = slots[size_t(e)];
    if (looks && slot < 0)
      slot = int32_t(word(mailbox, layout.arrived(routed.layer) + 4 * e).load(std::memory_order_acquire)) - 1;
    place[size_t(e)] = slot >= 0 ? kHit : kCpu;
  }
  if (routed.num_tokens == 1 && tables.split != nullptr && tables.store_base != 0)
    choose_reads_of_token(routed.ids, top_k, tables.split, place);
  if (routed.num_tokens > 1 && tables.prices != nullptr && tables.store_base != 0)
    choose_reads(routed.ids, num_pairs, *tables.prices, place);
  int pairs = 0;
  for (int kind = 0; kind < tables.num_kinds; ++kind) {
    const ExpertGroups of_kind = groups_of_kind(placed.groups, kind);
    int groups = 0;
    for (int e = 0; e < tables.num_experts; ++e) {
      const int count = count_pairs(routed.ids, num_pairs, e);
      if (count == 0 || place[size_t(e)] == kCpu) continue;
      if (tables.num_kinds > 1 && tables.kinds[e] != kind) continue;
      of_kind.weights[groups] = place[size_t(e)] == kHit
                                    ? tables.slot_base + uint64_t(slots[size_t(e)]) * tables.slot_stride
                                    : tables.store_base + uint64_t(tables.store_offsets[e]);
      of_kind.begin[groups++] = pairs;
      write_pairs(routed.ids, num_pairs, e, placed.groups.pairs + pairs);
      pairs += count;
    }
    of_kind.begin[groups] = pairs;
    *of_kind.num_groups = groups;
  }
  uint32_t on_cpu = 0;
  for (int p = 0; p < num_pairs; ++p) {
    placed.where[p] = routed.ids[p] < 0 ? kPadding : place[size_t(routed.ids[p])];
    on_cpu += placed.where[p] == kCpu;
  }
  *placed.num_on_cpu = on_cpu;
  if (memory == nullptr) return 0;
  std::memcpy(mailbox + layout.ids(routed.layer), routed.ids, size_t(num_pairs) * 4);
  std::memcpy(mailbox + layout.weights(routed.layer), routed.weights, size_t(num_pairs) * 4);
  std::memcpy(mailbox + layout.where(routed.layer), placed.where, size_t(num_pairs));
  if (on_cpu > 0) {
    std::memcpy(mailbox + layout.activations(), routed.normed,
                size_t(routed.num_tokens) * size_t(shape.hidden) * 2);
  }
  if (looks && routed.ahead != nullptr) {
    std::memcpy(mailbox + layout.ahead(routed.layer), routed.ahead,
                size_t(routed.num_tokens) * size_t(shape.num_ahead) * 4);
  }
  auto* post = reinterpret_cast<MailboxPost*>(mailbox + layout.post(routed.layer));
  post->num_tokens = uint32_t(routed.num_tokens);
  post->num_on_cpu = on_cpu;
  post->has_ahead = looks && routed.ahead != nullptr;
  post->placed_ns = begin_ns;
  word(mailbox, layout.post(routed.layer)).store(*step, std::memory_order_release);
  return 0;
}

int launch_wait(const MailboxShape& shape, void* memory, int layer, const uint32_t* step,
                const uint32_t* num_on_cpu, int64_t limit_ns, Stream) {
  if (!can_wait(shape, memory, layer, step, num_on_cpu, limit_ns)) return kInvalidValue;
  uint8_t* mailbox = static_cast<uint8_t*>(memory);
  const MailboxLayout layout{shape};
  const int64_t now = nanoseconds();
  reinterpret_cast<MailboxPost*>(mailbox + layout.post(layer))->computed_ns = now;
  if (*num_on_cpu == 0) return 0;
  while (word(mailbox, layout.answer(layer)).load(std::memory_order_acquire) != *step) {
    if (word(mailbox, layout.control()).load(std::memory_order_acquire) != 0) return 0;
    if (nanoseconds() > now + limit_ns) {
      word(mailbox, layout.report()).store(uint32_t(layer) + 1, std::memory_order_release);
      return 0;
    }
    sched_yield();
  }
  return 0;
}

int launch_combine(const CombinedLayer& layer, Stream) {
  if (!can_combine(layer)) return kInvalidValue;
  const auto& [outputs, weights, where, from_cpu, num_tokens, top_k, hidden_size, hidden, joined_ns] = layer;
  if (joined_ns != nullptr) *joined_ns = nanoseconds();
  for (int t = 0; t < num_tokens; ++t) {
    for (int c = 0; c < hidden_size; ++c) {
      float& sum = hidden[int64_t(t) * hidden_size + c];
      bool on_cpu = false;
      for (int pair = t * top_k; pair < (t + 1) * top_k; ++pair) {
        on_cpu |= where[pair] == kCpu;
        if (where[pair] == kHit || where[pair] == kFetched)
          sum = fused(weights[pair], outputs[int64_t(pair) * hidden_size + c], sum);
      }
      if (on_cpu && from_cpu != nullptr) sum += from_cpu[int64_t(t) * hidden_size + c];
    }
  }
  return 0;
}

}  // namespace cuda

}  // namespace twofold
