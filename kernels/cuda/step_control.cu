
#include "launch_shapes.h"
#include "machine.cuh"
#include "step_control.h"

namespace twofold::cuda {

namespace {

constexpr int kPlaceThreads = 512;

__global__ void begin_step_kernel(uint32_t* step) { *step = next_step(*step); }

// For one token: which misses the device reads from the host itself, the best routed first.
__device__ inline void choose_reads_of_token(const int32_t* ids, int top_k, const uint8_t* split,
                                             uint8_t* place) {
  int hits = 0;
  if (ids[0] < 0) return;
  for (int k = 0; k < top_k; ++k) hits += place[ids[k]] == kHit;
  int reads = split[hits * (top_k + 1) + top_k - hits];
  for (int k = 0; k < top_k && reads > 0; ++k) {
    if (place[ids[k]] != kCpu) continue;
    place[ids[k]] = kFetched;
    --reads;
  }
}

__device__ inline void add(uint64_t* sum, uint32_t ns) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(ns));
}

// For several tokens, by the whole block: `misses` [experts] is room.
__device__ inline void choose_reads(const int32_t* counts, int num_experts, const ReadPrices& prices,
                                    int32_t* misses, uint8_t* place) {
  if (prices.reads == 0) return;
  ReadSums& sums = static_shared<ReadSums>();
  int& reads = static_shared<int>();
  if (threadIdx.x == 0) sums = {};
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kPlaceThreads) {
    if (counts[e] == 0) continue;
    if (place[e] == kHit) {
      atomicAdd(&sums.num_hits, 1u);
      add(&sums.hit_ns, prices.gpu_ns[counts[e]]);
    } else {
      atomicAdd(&sums.num_misses, 1u);
      add(&sums.cpu_ns, prices.cpu_ns[counts[e]]);
      add(&sums.slowed_ns, prices.slowed_ns[counts[e]]);
      misses[misses_before(counts, place, num_experts, e)] = e;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) reads = num_reads(misses, counts, sums, prices);
  __syncthreads();
  for (int n = threadIdx.x; n < reads; n += kPlaceThreads) place[misses[n]] = kFetched;
}

__device__ inline int kind_of(const PlacementTables& tables, int expert) {
  return tables.num_kinds > 1 ? tables.kinds[expert] : 0;
}

// One block. Shared memory: ids [pairs], then per expert its tokens, its group, its first pair and its slot, then
// its place.
__global__ void __launch_bounds__(kPlaceThreads, 1)
    place_kernel(RoutedLayer routed, PlacementTables tables, PlacedLayer placed, MailboxLayout layout,
                 uint8_t* mailbox, const uint32_t* step) {
  int32_t* shared = dynamic_shared<int32_t>();
  const int num_experts = tables.num_experts, top_k = layout.shape.top_k;
  const int num_pairs = routed.num_tokens * top_k;
  int32_t* ids = shared;
  int32_t* counts = ids + num_pairs;
  int32_t* group_of = counts + num_experts;
  int32_t* begin_of = group_of + num_experts;
  int32_t* slots = begin_of + num_experts;
  uint8_t* place = reinterpret_cast<uint8_t*>(slots + num_experts);
  uint32_t& on_cpu = static_shared<uint32_t>();
  int64_t begin_ns = 0;
  if (threadIdx.x == 0) {
    on_cpu = 0;
    begin_ns = nanoseconds();
  }
  for (int p = threadIdx.x; p < num_pairs; p += kPlaceThreads) ids[p] = routed.ids[p];
  __syncthreads();
  const bool looks = mailbox != nullptr && layout.shape.num_ahead > 0;
  const uint32_t* arrived = reinterpret_cast<const uint32_t*>(mailbox + layout.arrived(routed.layer));
  for (int e = threadIdx.x; e < num_experts; e += kPlaceThreads) {
    counts[e] = count_pairs(ids, num_pairs, e);
    slots[e] = tables.slots[e];
    if (looks && slots[e] < 0) slots[e] = int32_t(load_acquire(arrived + e)) - 1;
    place[e] = slots[e] >= 0 ? kHit : kCpu;
  }
  __syncthreads();
  if (threadIdx.x == 0 && routed.num_tokens == 1 && tables.split != nullptr && tables.store_base != 0)
    choose_reads_of_token(ids, top_k, tables.split, place);
  if (routed.num_tokens > 1 && tables.prices != nullptr && tables.store_base != 0)
    choose_reads(counts, num_experts, *tables.prices, begin_of, place);
  __syncthreads();

  // Groups of one kind after the other, in ascending order of expert: one warp scans, 32 experts at a time.
  if (threadIdx.x < kWarpSize) {
    int pairs = 0;
    for (int kind = 0; kind < tables.num_kinds; ++kind) {
      int groups = 0;
      for (int first = 0; first < num_experts; first += kWarpSize) {
        const int e = first + threadIdx.x;
        const bool is_mine = e < num_experts && place[e] != kCpu && kind_of(tables, e) == kind;
        const int mine = is_mine ? counts[e] : 0;
        int pairs_before = mine, groups_before = mine > 0;
#pragma unroll
        for (int reach = 1; reach < kWarpSize; reach *= 2) {
          const int more_pairs = __shfl_up_sync(0xffffffffu, pairs_before, reach);
          const int more_groups = __shfl_up_sync(0xffffffffu, groups_before, reach);
          if (int(threadIdx.x) >= reach) {
            pairs_before += more_pairs;
            groups_before += more_groups;
          }
        }
        if (e < num_experts && (mine > 0 || kind == 0)) {
          group_of[e] = mine > 0 ? groups + groups_before - 1 : -1;
          begin_of[e] = pairs + pairs_before - mine;
        }
        pairs += __shfl_sync(0xffffffffu, pairs_before, kWarpSize - 1);
        groups += __shfl_sync(0xffffffffu, groups_before, kWarpSize - 1);
      }
      if (threadIdx.x == 0) {
        const ExpertGroups of_kind = groups_of_kind(placed.groups, kind);
        *of_kind.num_groups = groups;
        of_kind.begin[groups] = pairs;
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kPlaceThreads) {
    const int group = group_of[e];
    if (group < 0) continue;
    const ExpertGroups of_kind = groups_of_kind(placed.groups, kind_of(tables, e));
    of_kind.weights[group] = place[e] == kHit ? tables.slot_base + uint64_t(slots[e]) * tables.slot_stride
                                              : tables.store_base + uint64_t(tables.store_offsets[e]);
    of_kind.begin[group] = begin_of[e];
    write_pairs(ids, num_pairs, e, placed.groups.pairs + begin_of[e]);
  }
  uint32_t mine = 0;
  for (int p = threadIdx.x; p < num_pairs; p += kPlaceThreads) {
    const uint8_t where = ids[p] < 0 ? kPadding : place[ids[p]];  // < 0: a row of padding
    placed.where[p] = where;
    mine += where == kCpu;
    if (mailbox != nullptr) {
      reinterpret_cast<int32_t*>(mailbox + layout.ids(routed.layer))[p] = ids[p];
      reinterpret_cast<float*>(mailbox + layout.weights(routed.layer))[p] = routed.weights[p];
      mailbox[layout.where(routed.layer) + p] = where;
    }
  }
  if (looks && routed.ahead != nullptr) {
    float* out = reinterpret_cast<float*>(mailbox + layout.ahead(routed.layer));
    for (int i = threadIdx.x; i < routed.num_tokens * num_experts; i += kPlaceThreads)
      out[i] = routed.ahead[i];
  }
  if (mine > 0) atomicAdd(&on_cpu, mine);  // an integer: order does not matter
  __syncthreads();
  if (mailbox != nullptr && on_cpu > 0) {
    const int chunks = int(int64_t(routed.num_tokens) * layout.shape.hidden * 2 / 16);
    uint4* out = reinterpret_cast<uint4*>(mailbox + layout.activations());
    for (int i = threadIdx.x; i < chunks; i += kPlaceThreads)
      out[i] = static_cast<const uint4*>(routed.normed)[i];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  *placed.num_on_cpu = on_cpu;
  if (mailbox == nullptr) return;
  MailboxPost* post = reinterpret_cast<MailboxPost*>(mailbox + layout.post(routed.layer));
  post->num_tokens = uint32_t(routed.num_tokens);
  post->num_on_cpu = on_cpu;
  post->has_ahead = looks && routed.ahead != nullptr;
  post->placed_ns = begin_ns;
  __threadfence_system();  // the other threads' writes too: they came before the barrier
  store_release(&post->posted, *step);
}

__global__ void wait_kernel(MailboxLayout layout, uint8_t* mailbox, int layer, const uint32_t* step,
                            const uint32_t* num_on_cpu, int64_t limit_ns) {
  const int64_t now = nanoseconds();
  reinterpret_cast<MailboxPost*>(mailbox + layout.post(layer))->computed_ns = now;
  if (*num_on_cpu == 0) return;
  const uint32_t wanted = *step;
  const MailboxAnswer* answer = reinterpret_cast<const MailboxAnswer*>(mailbox + layout.answer(layer));
  const MailboxControl* control = reinterpret_cast<const MailboxControl*>(mailbox + layout.control());
  MailboxReport* report = reinterpret_cast<MailboxReport*>(mailbox + layout.report());
  const int64_t deadline = now + limit_ns;
  for (uint32_t turn = 0; load_acquire(&answer->answered) != wanted; ++turn) {
    if (turn % 64 != 63) continue;
    if (load_acquire(&control->abort) != 0) return;
    if (nanoseconds() > deadline) {
      store_release(&report->timed_out, uint32_t(layer) + 1);
      return;
    }
  }
}

}  // namespace

int launch_begin_step(uint32_t* step, Stream stream) {
  if (step == nullptr) return cudaErrorInvalidValue;
  return launch(begin_step_kernel, 1, 1, 0, stream, step);
}

int launch_place(const RoutedLayer& routed, const PlacementTables& tables, const PlacedLayer& placed,
                 const MailboxShape& shape, void* mailbox, const uint32_t* step, Stream stream) {
  const int num_pairs = routed.num_tokens * shape.top_k;
  const int64_t shared = 4 * int64_t(num_pairs) + 17 * int64_t(tables.num_experts);
  if (!can_place(routed, tables, placed, shape, mailbox, step) || shared > 48 * 1024)
    return cudaErrorInvalidValue;
  return launch(place_kernel, 1, kPlaceThreads, shared, stream, routed, tables, placed, MailboxLayout{shape},
                static_cast<uint8_t*>(mailbox), step);
}

int launch_wait(const MailboxShape& shape, void* mailbox, int layer, const uint32_t* step,
                const uint32_t* num_on_cpu, int64_t limit_ns, Stream stream) {
  if (!can_wait(shape, mailbox, layer, step, num_on_cpu, limit_ns)) return cudaErrorInvalidValue;
  return launch(wait_kernel, 1, 1, 0, stream, MailboxLayout{shape}, static_cast<uint8_t*>(mailbox), layer,
                step, num_on_cpu, limit_ns);
}

}  // namespace twofold::cuda
