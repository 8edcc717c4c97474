#include "moe/slotted_accelerator.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

SlottedAccelerator::SlottedAccelerator(const ExpertStore& store, const LayerSchedulerConfig& config)
    : store_(store) {
  if (config.num_layers == store.num_layers() && config.num_experts == store.num_experts()) return;
  throw std::invalid_argument("scheduler configuration for " + std::to_string(config.num_layers) +
                              " layers of " + std::to_string(config.num_experts) +
                              " experts given, the store's " + std::to_string(store.num_layers()) + " of " +
                              std::to_string(store.num_experts()) + " expected");
}

void SlottedAccelerator::record_to(EventLog& events) {
  events_ = &events;
  pending_.resize(size_t(event_slot(num_devices(), 0)));
}

void SlottedAccelerator::record_fill(int64_t first_step) {
  rows_.step = first_step;
  has_begun_ = true;
}

int64_t SlottedAccelerator::record_release() {
  const int64_t last_step = has_begun_ ? rows_.step : -1;
  has_begun_ = true;
  for (int d = 0; d < num_devices(); ++d) {
    for (int layer = 0; layer < store_.num_layers(); ++layer) {
      for (int expert = 0; expert < store_.num_experts(); ++expert) {
        const int slot = scheduler().devices().cache(d).slot_of(layer, expert);
        if (slot >= 0) record_contents(CacheEventKind::kEvict, d, {layer, expert, slot});
      }
    }
  }
  return last_step;
}

int SlottedAccelerator::num_slots() const {
  int total = 0;
  for (int d = 0; d < num_devices(); ++d) total += scheduler().devices().num_slots(d);
  return total;
}

int SlottedAccelerator::event_slot(int device, int slot) const {
  for (int d = 0; d < device; ++d)
    slot += scheduler().devices().num_slots(d) + scheduler().devices().num_staging();
  return slot;
}

void SlottedAccelerator::save(const std::string& path) const {
  const ExpertCache& cache = scheduler().devices().cache(0);
  std::vector<uint8_t> held;
  for (int layer = 0; layer < store_.num_layers(); ++layer) {
    for (int expert = 0; expert < store_.num_experts(); ++expert) {
      held.push_back(scheduler().devices().holds(layer, expert));
    }
  }
  cache.save(path, held);
}

void SlottedAccelerator::record_contents(CacheEventKind kind, int device, const Transfer& what) {
  if (events_ == nullptr || !events_->enabled || (num_devices() == 1 && !has_begun_)) return;
  events_->cache_events.push({rows_.step, -1, int16_t(what.layer), uint8_t(kind), uint16_t(what.expert), -1,
                              event_slot(device, what.slot), 0.0f, 0.0f, 0.0f, scheduler().devices().now_us(),
                              uint8_t(device)});
}

bool SlottedAccelerator::fetch(int layer, int expert) {
  LayerScheduler& scheduler = this->scheduler();
  if (scheduler.devices().holds(layer, expert)) return false;
  for (int d = 0; d < num_devices(); ++d) {
    ExpertCache& cache = scheduler.devices().cache(d);
    if (!cache.preload(layer, expert)) continue;
    try {
      fill(d, {layer, expert, cache.slot_of(layer, expert)});
      record_contents(CacheEventKind::kAdmit, d, {layer, expert, cache.slot_of(layer, expert)});
    } catch (...) {
      cache.evict(layer, expert);  // the slot's contents are undefined
      throw;
    }
    return true;
  }
  return false;
}

void SlottedAccelerator::preload_all() {
  for (int layer = 0; layer < store_.num_layers(); ++layer) {
    for (int expert = 0; expert < store_.num_experts(); ++expert) {
      if (scheduler().devices().cache(0).config().pin(layer) != LayerPin::kFree) continue;
      if (!fetch(layer, expert)) {
        throw std::logic_error("preload_all needs a slot for every expert; there are " +
                               std::to_string(num_slots()));
      }
    }
  }
}

void SlottedAccelerator::fill_pinned() {
  for (int layer = 0; layer < store_.num_layers(); ++layer) {
    const int home = scheduler().config().home(layer);
    const ExpertCache& cache = scheduler().devices().cache(home);
    if (cache.config().pin(layer) != LayerPin::kResident) continue;
    for (int expert = 0; expert < store_.num_experts(); ++expert) {
      const Transfer what{layer, expert, cache.slot_of(layer, expert)};
      fill(home, what);
      record_contents(CacheEventKind::kAdmit, home, what);
    }
  }
}

int SlottedAccelerator::restore(const std::string& path) {
  std::vector<int> order;  // the same of each
  for (int d = 0; d < num_devices(); ++d) order = scheduler().devices().cache(d).load(path);
  int uploaded = 0;
  for (int cell : order) uploaded += fetch(cell / store_.num_experts(), cell % store_.num_experts());
  return uploaded;
}

int SlottedAccelerator::place_experts(std::span<const uint8_t> wanted) {
  const int num_layers = store_.num_layers(), num_experts = store_.num_experts();
  LayerScheduler& scheduler = this->scheduler();
  const CacheConfig& config = scheduler.devices().cache(0).config();
  const auto refuse = [](const std::string& given, int expected) {
    throw std::invalid_argument("a placement of " + given + " given, at most " + std::to_string(expected) +
                                " expected: there are no more slots");
  };
  if (wanted.size() != size_t(num_layers) * size_t(num_experts)) {
    throw std::invalid_argument("a placement of " + std::to_string(wanted.size()) +
                                " experts given, one of the model's " + std::to_string(num_layers) + " x " +
                                std::to_string(num_experts) + " expected");
  }
  int total = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    if (config.pin(layer) != LayerPin::kFree) {  // pinned: not changed by `wanted`
      const ExpertCache& home = scheduler.devices().cache(scheduler.config().home(layer));
      if (home.config().pin(layer) == LayerPin::kResident) total += num_experts;
      continue;
    }
    const auto of_layer = wanted.subspan(size_t(layer) * size_t(num_experts), size_t(num_experts));
    const auto count = int(std::count_if(of_layer.begin(), of_layer.end(), [](uint8_t w) { return w != 0; }));
    int slots = 0;
    for (int d = 0; d < num_devices(); ++d)
      slots += scheduler.devices().cache(d).config().slots_per_layer[size_t(layer)];
    if (!config.pooled() && count > slots)
      refuse(std::to_string(count) + " experts in layer " + std::to_string(layer), slots);
    total += count;
  }
  if (total > num_slots()) refuse(std::to_string(total) + " experts", num_slots());
  idle();
  for (int cell = 0; cell < int(wanted.size()); ++cell) {
    if (config.pin(cell / num_experts) != LayerPin::kFree) continue;
    bool keeps = wanted[size_t(cell)] != 0;  // one copy
    for (int d = 0; d < num_devices(); ++d) {
      ExpertCache& cache = scheduler.devices().cache(d);
      const Transfer what{cell / num_experts, cell % num_experts,
                          cache.slot_of(cell / num_experts, cell % num_experts)};
      if (!cache.is_resident(what.layer, what.expert) || std::exchange(keeps, false)) continue;
      cache.evict(what.layer, what.expert);
      record_contents(CacheEventKind::kEvict, d, what);
    }
  }
  int uploaded = 0;
  for (int cell = 0; cell < int(wanted.size()); ++cell) {
    if (wanted[size_t(cell)]) uploaded += fetch(cell / num_experts, cell % num_experts);
  }
  return uploaded;
}

void SlottedAccelerator::begin_step(const StepRows& rows) {
  rows_ = rows;
  has_begun_ = true;
  StepShape shape = step_shape_of(rows.requests, rows.positions, rows.verified);
  decodes_only_ = std::count(shape.prefill_rows.begin(), shape.prefill_rows.end(), 0) ==
                  std::ptrdiff_t(shape.prefill_rows.size());
  shape.generated_rows = rows.generated;
  scheduler().set_adapter_bytes(store_.adapted.bytes_per_expert(int(rows.requests.size())));
  publish_landed(std::move(shape));
}

// A batch beyond that needs nearly every expert anyway.
bool SlottedAccelerator::needs_look_ahead() const {
  constexpr size_t kMostRows = 32;
  return scheduler().prefetches() && decodes_only_ && rows_.requests.size() <= kMostRows;
}

void SlottedAccelerator::idle() {
  scheduler().devices().drain();
  publish_landed();
}

std::span<const uint8_t> SlottedAccelerator::residents(int layer) {
  residents_.resize(size_t(store_.num_experts()));
  for (int expert = 0; expert < store_.num_experts(); ++expert)
    residents_[size_t(expert)] = scheduler().devices().is_resident_anywhere(layer, expert);
  return residents_;
}

LayerTimes SlottedAccelerator::place(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                     std::span<GroupPlacement> placements) {
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  const LayerDecision& decision =
      scheduler().decide({layer, {routing.ids, num_pairs}, {routing.weights, num_pairs}, routing.num_tokens});
  record_decision(decision, layer, routing, groups);
  for (size_t g = 0; g < decision.experts.size(); ++g) {
    const ExpertDecision& e = decision.experts[g];
    placements[g] = {e.slot >= 0 ? slot(e.device, e.slot) : store_.expert(layer, e.expert), e.where,
                     e.where == Placement::kFetched && !e.landed, e.device};
  }
  decided(decision, placements);
  return decision.times;
}

void SlottedAccelerator::record_decision(const LayerDecision& decision, int layer,
                                         const LayerRouting& routing, const ExpertGroups& groups) {
  deferred_ = decision.deferred;
  const auto price_of = [&](int device) {
    return float(scheduler().devices().cache(device).config().upload_price);
  };
  for (const Publication& landed : decision.arrivals) report_landed(landed);
  // A prefetch that never began copied nothing over the link.
  events_->counts.uploads -= int64_t(decision.withdrawn.size());
  for (const int expert : decision.withdrawn)
    events_->counts.h2d_bytes -= int64_t(store_.layout(layer, expert).bytes);
  for (const Move& move : decision.moves) {
    // Uploads ahead serve the whole step; they have a request only if the step has no other.
    const int64_t request = move.layer == layer          ? request_of(routing, groups, move.expert)
                            : rows_.requests.size() == 1 ? rows_.requests[0]
                                                         : -1;
    const int64_t bytes = int64_t(store_.layout(move.layer, move.expert).bytes);
    const int slot = event_slot(move.device, move.slot);
    ++events_->counts.uploads;
    events_->counts.h2d_bytes += bytes;
    const UploadEvent upload{rows_.step,
                             request,
                             int16_t(move.layer),
                             uint16_t(move.expert),
                             slot,
                             bytes,
                             move.queued_us,
                             move.begin_us,
                             move.end_us,
                             uint8_t(move.reason),
                             uint8_t(lane_of(move.reason)),
                             uint8_t(move.device)};
    // If its times are not known yet, it is reported once it has landed.
    if (upload.end_us >= 0 && events_->enabled) events_->uploads.push(upload);
    if (move.staged) {
      if (upload.end_us < 0) staged_.push_back(upload);
      continue;
    }
    pending_[size_t(slot)] = upload;
    const auto note = [&](CacheEventKind kind, int of_layer, int expert) {
      if (!events_->enabled) return;
      events_->cache_events.push({rows_.step, request, int16_t(of_layer), uint8_t(kind), uint16_t(expert),
                                  move.evicted, slot, float(move.value), float(move.victim_value),
                                  price_of(move.device), move.queued_us, uint8_t(move.device)});
    };
    if (move.evicted >= 0) {
      ++events_->counts.evictions;
      note(CacheEventKind::kEvict, move.evicted_layer, move.evicted);
    }
    note(CacheEventKind::kAdmit, move.layer, move.expert);
  }
  if (events_->enabled && decision.rejection) {
    const Rejection& rejection = *decision.rejection;
    events_->cache_events.push({rows_.step, request_of(routing, groups, rejection.expert), int16_t(layer),
                                uint8_t(CacheEventKind::kReject), uint16_t(rejection.expert), -1, -1,
                                float(rejection.value), 0.0f, price_of(rejection.device), decision.start_us,
                                uint8_t(rejection.device)});
  }
}

void SlottedAccelerator::publish_landed(StepShape shape) {
  if (events_ == nullptr)
    throw std::logic_error("an accelerator works for an executor, which keeps its books");
  for (const Publication& landed : scheduler().begin_step(std::move(shape))) report_landed(landed);
}

void SlottedAccelerator::report_landed(const Publication& landed) {
  if (landed.left_device >= 0)
    record_contents(CacheEventKind::kEvict, landed.left_device,
                    {landed.layer, landed.expert, landed.left_slot});
  UploadEvent upload;
  const int slot = event_slot(landed.device, landed.slot);
  if (!landed.staged) {
    upload = pending_[size_t(slot)];
  } else {
    const auto found =
        std::find_if(staged_.begin(), staged_.end(), [&landed, slot](const UploadEvent& staged) {
          return staged.layer == landed.layer && staged.expert == landed.expert && staged.slot == slot;
        });
    if (found == staged_.end()) return;  // reported when it was decided
    upload = *found;
    staged_.erase(found);
  }
  if (landed.upload.failed) {
    --events_->counts.uploads;
    events_->counts.h2d_bytes -= upload.size_bytes;
    return;
  }
  if (upload.end_us < 0) {
    upload.begin_us = landed.upload.begin_us;
    upload.end_us = landed.upload.end_us;
    if (events_->enabled) events_->uploads.push(upload);
  }
  if (events_->enabled && !landed.staged) {
    events_->cache_events.push({rows_.step, upload.request, int16_t(landed.layer),
                                uint8_t(CacheEventKind::kPublish), uint16_t(landed.expert), -1, slot, 0.0f,
                                0.0f, 0.0f, landed.upload.end_us, uint8_t(landed.device)});
  }
}

int64_t SlottedAccelerator::request_of(const LayerRouting& routing, const ExpertGroups& groups,
                                       int expert) const {
  const auto at = std::lower_bound(groups.experts.begin(), groups.experts.end(), expert);
  const int pair = groups.pairs[size_t(groups.begin[size_t(at - groups.experts.begin())])];
  return rows_.requests[size_t(pair / routing.top_k)];
}

}  // namespace twofold
