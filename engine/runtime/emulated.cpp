#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "accelerator.h"

namespace twofold {

EmulatedAccelerator::EmulatedAccelerator(const ExpertStore& store, CostModel cost,
                                         LayerSchedulerConfig config, DenseCost dense_cost, EventLog& events)
    : store_(store),
      scheduler_(std::move(cost), std::move(config)),
      dense_cost_(std::move(dense_cost)),
      events_(events),
      slot_stride_((store.expert_bytes() + 63) / 64 * 64),
      arena_bytes_(std::max<size_t>(size_t(scheduler_.num_slots() + scheduler_.num_staging()), 1) *
                   slot_stride_),
      arena_(arena_bytes_),
      pending_(size_t(scheduler_.num_slots())) {
  const size_t expected = size_t(store.num_layers()) + 1;
  if (dense_cost_.bytes.size() != expected || dense_cost_.flops_per_token.size() != expected) {
    throw std::invalid_argument("dense costs are needed for " + std::to_string(expected) +
                                " stretches (one before each MoE layer, one after the last); given " +
                                std::to_string(dense_cost_.bytes.size()));
  }
}

void EmulatedAccelerator::preload_all() {
  for (int layer = 0; layer < store_.num_layers(); ++layer) {
    for (int expert = 0; expert < store_.num_experts(); ++expert) {
      if (!scheduler_.cache().preload(layer, expert)) {
        throw std::logic_error("preload_all needs a slot for every expert; there are " +
                               std::to_string(num_slots()));
      }
      copy_to_slot(layer, expert, scheduler_.cache().slot_of(layer, expert));
    }
  }
}

int EmulatedAccelerator::restore(const std::string& path) {
  int uploaded = 0;
  ExpertCache& cache = scheduler_.cache();
  for (int cell : cache.load(path)) {
    const int layer = cell / store_.num_experts();
    const int expert = cell % store_.num_experts();
    if (!cache.preload(layer, expert)) continue;
    copy_to_slot(layer, expert, cache.slot_of(layer, expert));
    ++uploaded;
  }
  return uploaded;
}

void EmulatedAccelerator::begin_step(const StepRows& rows) {
  rows_ = rows;
  StepShape shape = step_shape_of(rows.requests, rows.positions);
  decodes_only_ = std::count(shape.prefill_rows.begin(), shape.prefill_rows.end(), 0) ==
                  std::ptrdiff_t(shape.prefill_rows.size());
  publish_landed(std::move(shape));
}

// A batch beyond that needs nearly every expert anyway.
bool EmulatedAccelerator::wants_prediction() const {
  constexpr size_t kMostRows = 32;
  return scheduler_.prefetches() && decodes_only_ && rows_.requests.size() <= kMostRows;
}

void EmulatedAccelerator::predict(int layer, std::span<const float> logits, int num_tokens) {
  // The extra router reads its gate; its launch is part of the step's graph.
  scheduler_.advance(dense_cost_.router_bytes / (scheduler_.cost().profile().vram_bandwidth_gbps * 1e3));
  scheduler_.predict(layer, logits, num_tokens);
}

void EmulatedAccelerator::idle() {
  scheduler_.drain();
  publish_landed();
}

void EmulatedAccelerator::dense(int layer, int num_tokens) {
  const MachineProfile& machine = scheduler_.cost().profile();
  const double bytes_us = dense_cost_.bytes[size_t(layer)] / (machine.vram_bandwidth_gbps * 1e3);
  const double flops_us =
      dense_cost_.flops_per_token[size_t(layer)] * num_tokens / (machine.gpu_gflops * 1e3);
  scheduler_.advance(machine.gpu_launch_us + std::max(bytes_us, flops_us));
}

LayerTimes EmulatedAccelerator::place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                      std::span<GroupPlacement> placements) {
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  const LayerDecision& decision =
      scheduler_.decide(layer, {routing.ids, num_pairs}, {routing.weights, num_pairs}, routing.num_tokens);
  const float price = float(scheduler_.upload_price());

  for (const Publication& landed : decision.arrivals) report_published(landed);
  // A prefetch that never began moved nothing over the link.
  events_.counts.uploads -= decision.num_withdrawn;
  events_.counts.h2d_bytes -= decision.num_withdrawn * int64_t(store_.expert_bytes());
  for (const Move& move : decision.moves) {
    copy_to_slot(move.layer, move.expert, move.slot);
    // A prefetch serves the step; it has a request only where there is no other.
    const int64_t request = move.reason != UploadReason::kPrefetch ? request_of(routing, groups, move.expert)
                            : rows_.requests.size() == 1           ? rows_.requests[0]
                                                                   : -1;
    ++events_.counts.uploads;
    events_.counts.h2d_bytes += int64_t(store_.expert_bytes());
    const UploadEvent upload{
        rows_.step,
        request,
        int16_t(move.layer),
        uint16_t(move.expert),
        move.slot,
        int64_t(store_.expert_bytes()),
        move.queued_us,
        move.begin_us,
        move.end_us,
        uint8_t(move.reason),
        uint8_t(move.reason == UploadReason::kDemand ? UploadLane::kDemand : UploadLane::kBackground)};
    // A background upload's times are known when it has landed: publish_landed completes and reports it.
    if (move.reason == UploadReason::kDemand && events_.enabled) events_.uploads.push(upload);
    if (move.staged) continue;
    pending_[size_t(move.slot)] = upload;
    const auto note = [&](CacheEventKind kind, int of_layer, int expert) {
      if (!events_.enabled) return;
      events_.cache_events.push({rows_.step, request, int16_t(of_layer), uint8_t(kind), uint16_t(expert),
                                 move.evicted, move.slot, float(move.value), float(move.victim_value), price,
                                 move.queued_us});
    };
    if (move.evicted >= 0) {
      ++events_.counts.evictions;
      note(CacheEventKind::kEvict, move.evicted_layer, move.evicted);
    }
    note(CacheEventKind::kAdmit, move.layer, move.expert);
  }
  if (events_.enabled && decision.rejection) {
    const Rejection& rejection = *decision.rejection;
    events_.cache_events.push({rows_.step, request_of(routing, groups, rejection.expert), int16_t(layer),
                               uint8_t(CacheEventKind::kReject), uint16_t(rejection.expert), -1, -1,
                               float(rejection.value), 0.0f, price, decision.start_us});
  }
  for (size_t g = 0; g < decision.experts.size(); ++g) {
    const ExpertDecision& e = decision.experts[g];
    placements[g] = {e.slot >= 0 ? slot(e.slot) : store_.expert(layer, e.expert), e.where};
  }
  return decision.times;
}

void EmulatedAccelerator::copy_to_slot(int layer, int expert, int slot_index) {
  std::memcpy(slot(slot_index), store_.expert(layer, expert), store_.layout(layer).bytes);
}

void EmulatedAccelerator::publish_landed(StepShape shape) {
  for (const Publication& landed : scheduler_.begin_step(std::move(shape))) report_published(landed);
}

void EmulatedAccelerator::report_published(const Publication& landed) {
  if (landed.staged) return;  // reported when it was decided
  UploadEvent& upload = pending_[size_t(landed.slot)];
  const int64_t request = upload.request;
  if (landed.upload.lane == UploadLane::kBackground) {
    upload.begin_us = landed.upload.begin_us;
    upload.end_us = landed.upload.end_us;
    if (events_.enabled) events_.uploads.push(upload);
  }
  if (events_.enabled) {
    events_.cache_events.push({rows_.step, request, int16_t(landed.layer), uint8_t(CacheEventKind::kPublish),
                               uint16_t(landed.expert), -1, landed.slot, 0.0f, 0.0f, 0.0f,
                               landed.upload.end_us});
  }
}

int64_t EmulatedAccelerator::request_of(const LayerRouting& routing, const ExpertGroups& groups,
                                        int expert) const {
  const auto at = std::lower_bound(groups.experts.begin(), groups.experts.end(), expert);
  const int pair = groups.pairs[size_t(groups.begin[size_t(at - groups.experts.begin())])];
  return rows_.requests[size_t(pair / routing.top_k)];
}

}  // namespace twofold
