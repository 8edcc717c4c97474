#include "device/cuda_accelerator.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace twofold {

namespace {

// Plans are made anew when the link is that much off what they were made for.
constexpr double kRecalibrateBeyond = 0.05;

UploadSettings settings_of(const CostModel& cost, bool source_pinned) {
  UploadSettings settings;
  settings.latency_us = cost.profile().link_latency_us;
  settings.bandwidth_gbps = cost.profile().link_bandwidth_gbps;
  settings.upload_us = cost.upload_us();
  settings.source_pinned = source_pinned;
  return settings;
}

}  // namespace

CudaAccelerator::CudaAccelerator(std::shared_ptr<DeviceApi> api, const ExpertStore& store, CostModel cost,
                                 LayerSchedulerConfig config)
    : SlottedAccelerator(store, config),
      api_(std::move(api)),
      store_range_(*api_, store.base(), store.allocated_bytes(), store.mapped(),
                   "the experts in host memory"),
      slots_(*api_, config.usable_slots(), config.staging_slots(), store.expert_bytes()),
      tables_(*api_, config.num_layers, config.num_experts, slots_.num_slots()),
      uploads_(
          *api_, slots_, tables_,
          [&store](int layer, int expert) {
            return std::span<const std::byte>(store.expert(layer, expert), store.layout(layer).bytes);
          },
          settings_of(cost, store_range_.pinned())),
      scheduler_(cost, std::move(config), uploads_),
      calibrated_(std::move(cost)) {}

void CudaAccelerator::begin_step(const StepRows& rows) {
  SlottedAccelerator::begin_step(rows);
  const double factor = uploads_.correction();
  if (std::abs(factor / applied_correction_ - 1) <= kRecalibrateBeyond) return;
  MachineProfile profile = calibrated_.profile();
  profile.link_latency_us *= factor;
  profile.link_bandwidth_gbps /= factor;
  scheduler_.recalibrate(calibrated_.with_profile(std::move(profile)));
  applied_correction_ = factor;
}

void CudaAccelerator::decided(const LayerDecision& decision, std::span<GroupPlacement> placements) {
  // An expert whose upload could not even begin runs where it is.
  placed_layer_ = decision.layer;
  for (int refused : uploads_.take_refused()) {
    scheduler_.ahead_refused(refused);
    for (size_t g = 0; g < decision.experts.size(); ++g) {
      const ExpertDecision& e = decision.experts[g];
      if (e.slot != refused || e.where != Placement::kFetched) continue;
      placements[g] = {store().expert(decision.layer, e.expert), Placement::kCpu};
    }
  }
}

void CudaAccelerator::host_computes() {
  require(api_->lend_to_host(), "lend its memory to the host");
  uploads_.host_waits();
}

void CudaAccelerator::before_compute(StreamHandle compute) { uploads_.compute_waits(compute, placed_layer_); }

void CudaAccelerator::after_compute(StreamHandle compute) { uploads_.follow_compute(compute); }

void CudaAccelerator::begin_table_step(StreamHandle compute) {
  tables_.begin_step(scheduler_.cache(), compute);
}

LayerTimes CudaAccelerator::follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                   std::span<const Placement> where) {
  tables_.reached(layer);
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  const LayerDecision& decision = scheduler_.follow(layer, {routing.ids, num_pairs},
                                                    {routing.weights, num_pairs}, where, routing.num_tokens);
  keep_books(decision, layer, routing, groups);
  return decision.times;
}

void CudaAccelerator::end_table_step(StreamHandle compute) {
  uploads_.follow_compute(compute);
  tables_.end_step();
}

}  // namespace twofold
