#include "device/device_accelerator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "read_choice.h"

namespace twofold {

namespace {

// Plans are recomputed when the link deviates this much from their assumption.
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

DeviceAccelerator::DeviceAccelerator(std::shared_ptr<DeviceApi> api, const ExpertStore& store, CostModel cost,
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

void DeviceAccelerator::begin_step(const StepRows& rows) {
  SlottedAccelerator::begin_step(rows);
  const double factor = uploads_.correction();
  if (std::abs(factor / applied_correction_ - 1) <= kRecalibrateBeyond) return;
  MachineProfile profile = calibrated_.profile();
  profile.link_latency_us *= factor;
  profile.link_bandwidth_gbps /= factor;
  scheduler_.recalibrate(calibrated_.with_profile(std::move(profile)));
  applied_correction_ = factor;
}

void DeviceAccelerator::decided(const LayerDecision& decision, std::span<GroupPlacement> placements) {
  // An expert whose upload could not even begin runs on the CPU.
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

void DeviceAccelerator::host_computes() {
  require(api_->lend_to_host(), "lend its memory to the host");
  uploads_.host_waits();
}

void DeviceAccelerator::before_compute(StreamHandle compute) {
  uploads_.compute_waits(compute, placed_layer_);
}

void DeviceAccelerator::after_compute(StreamHandle compute) { uploads_.follow_compute(compute); }

void DeviceAccelerator::begin_table_step(StreamHandle compute) {
  tables_.begin_step(scheduler_.cache(), compute);
}

std::vector<uint32_t> DeviceAccelerator::read_prices() const {
  const auto ns = [](double us) {
    return uint32_t(std::min(std::round(us * 1e3), double(std::numeric_limits<uint32_t>::max())));
  };
  const CostModel& cost = scheduler_.cost();
  const double chi = cost.profile().contention;
  cuda::ReadPrices prices{};
  prices.reads = scheduler_.fetch_rule() == FetchRule::kBestSplit;
  prices.launch_ns = ns(cost.profile().gpu_launch_us);
  prices.handshake_ns = ns(cost.profile().handshake_us);
  for (int n = 1; n <= cuda::kMostReadTokens; ++n) {
    const int turns = (n + cuda::kDecodeTokens - 1) / cuda::kDecodeTokens;
    prices.gpu_ns[n] = ns(cost.gpu_expert_us(n));
    prices.link_ns[n] = ns(turns * cost.upload_us());
    prices.cpu_ns[n] = ns(cost.cpu_expert_us(n));
    prices.slowed_ns[n] = ns(chi * cost.cpu_expert_us(n));
    prices.drag_ns[n] = ns(chi / (1 + chi) * turns * cost.upload_us());
  }
  std::vector<uint32_t> words(cuda::kReadPriceWords);
  std::memcpy(words.data(), &prices, sizeof prices);
  return words;
}

LayerTimes DeviceAccelerator::follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                     std::span<const Placement> where) {
  tables_.reached(layer);
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  const LayerDecision& decision = scheduler_.follow(layer, {routing.ids, num_pairs},
                                                    {routing.weights, num_pairs}, where, routing.num_tokens);
  keep_books(decision, layer, routing, groups);
  return decision.times;
}

void DeviceAccelerator::look_ahead(int layer, const LayerRouting& routing, std::span<const Placement> where,
                                   std::span<const float> logits) {
  tables_.reached(layer);
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  scheduler_.predict(layer + 1, logits, routing.num_tokens);
  keep_books(scheduler_.look_ahead(layer, {routing.ids, num_pairs}, where), layer, routing, {});
}

std::span<const Publication> DeviceAccelerator::settle_ahead(int layer) {
  const LayerDecision& decision = scheduler_.settle_ahead(layer);
  keep_books(decision, layer, {}, {});
  for (const Publication& landed : decision.arrivals) tables_.arrived(layer, landed.slot);
  return decision.arrivals;
}

void DeviceAccelerator::end_table_step(StreamHandle compute) {
  uploads_.follow_compute(compute);
  tables_.end_step();
}

}  // namespace twofold
