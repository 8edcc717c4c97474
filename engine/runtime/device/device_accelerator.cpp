#include "device/device_accelerator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "read_choice.h"

namespace twofold {

namespace {

// Plans are recomputed when the link deviates this much from their assumption.
constexpr double kRecalibrateBeyond = 0.05;

UploadSettings settings_of(const DeviceCost& cost, bool source_pinned, double start_us) {
  UploadSettings settings;
  settings.start_us = start_us;
  settings.latency_us = cost.profile().link_latency_us;
  settings.bandwidth_gbps = cost.profile().link_bandwidth_gbps;
  settings.upload_us = cost.upload_us();
  settings.source_pinned = source_pinned;
  return settings;
}

std::vector<std::unique_ptr<DeviceSlots>> slots_of(std::span<const std::shared_ptr<DeviceApi>> apis,
                                                   const ExpertStore& store, const CostModel& cost,
                                                   const LayerSchedulerConfig& config) {
  const auto expected = size_t(cost.num_devices());
  if (apis.size() != expected || size_t(config.num_devices()) != expected) {
    throw std::invalid_argument("an accelerator of " + std::to_string(apis.size()) +
                                " devices with slots for " + std::to_string(config.num_devices()) +
                                " was given; " + std::to_string(expected) +
                                " of each were expected, as in the cost model");
  }
  const double start_us = apis.front()->now_us();
  std::vector<std::unique_ptr<DeviceSlots>> devices;
  for (const std::shared_ptr<DeviceApi>& api : apis) {
    devices.push_back(std::make_unique<DeviceSlots>(api, store, cost, config, int(devices.size()), start_us));
  }
  return devices;
}

std::vector<Link*> links_of(const std::vector<std::unique_ptr<DeviceSlots>>& devices) {
  std::vector<Link*> links;
  for (const auto& device : devices) links.push_back(&device->uploads);
  return links;
}

}  // namespace

DeviceSlots::DeviceSlots(std::shared_ptr<DeviceApi> device_api, const ExpertStore& store,
                         const CostModel& cost, const LayerSchedulerConfig& config, int device,
                         double start_us)
    : api(std::move(device_api)),
      store_range(*api, store.base(), store.allocated_bytes(), store.mapped(), "the experts in host memory"),
      slots(*api, config.usable_slots(device), config.staging_slots(), store.expert_bytes()),
      tables(*api, config.num_layers, config.num_experts, slots.num_slots()),
      uploads(
          *api, slots, tables,
          [&store](int layer, int expert) {
            return std::span<const std::byte>(store.expert(layer, expert), store.layout(layer, expert).bytes);
          },
          settings_of(cost.device(device), store_range.pinned(), start_us)) {}

DeviceAccelerator::DeviceAccelerator(std::span<const std::shared_ptr<DeviceApi>> apis,
                                     const ExpertStore& store, CostModel cost, LayerSchedulerConfig config)
    : SlottedAccelerator(store, config),
      devices_(slots_of(apis, store, cost, config)),
      scheduler_(cost, std::move(config), links_of(devices_)),
      calibrated_(std::move(cost)) {}

size_t DeviceAccelerator::device_bytes() const {
  size_t total = 0;
  for (const auto& device : devices_) total += device->slots.bytes();
  return total;
}

void DeviceAccelerator::begin_step(const StepRows& rows) {
  SlottedAccelerator::begin_step(rows);
  const bool deviates = std::any_of(devices_.begin(), devices_.end(), [](const auto& device) {
    return std::abs(device->uploads.correction() / device->applied_correction - 1) > kRecalibrateBeyond;
  });
  if (!deviates) return;
  MachineProfile machine = calibrated_.profile();
  for (size_t d = 0; d < devices_.size(); ++d) {
    DeviceProfile& profile = machine.devices[d];
    const double factor = devices_[d]->uploads.correction();
    profile.link_latency_us *= factor;
    profile.link_bandwidth_gbps /= factor;
    devices_[d]->applied_correction = factor;
  }
  scheduler_.recalibrate(
      calibrated_.with_profile(std::move(machine)).with_adapters(scheduler_.cost().adapter_bytes()));
}

void DeviceAccelerator::decided(const LayerDecision& decision, std::span<GroupPlacement> placements) {
  // An expert whose upload could not even begin runs on the CPU.
  placed_layer_ = decision.layer;
  for (size_t d = 0; d < devices_.size(); ++d) {
    for (int refused : devices_[d]->uploads.take_refused()) {
      scheduler_.ahead_refused(int(d), refused);
      for (size_t g = 0; g < decision.experts.size(); ++g) {
        const ExpertDecision& e = decision.experts[g];
        if (e.slot != refused || e.device != int(d) || e.where != Placement::kFetched) continue;
        placements[g] = {store().expert(decision.layer, e.expert), Placement::kCpu};
      }
    }
  }
}

void DeviceAccelerator::host_computes() {
  for (const auto& device : devices_) {
    require(device->api->share_with_host(), "share its memory with the host");
    device->uploads.host_waits();
  }
}

void DeviceAccelerator::end_step() {
  for (const auto& device : devices_) device->uploads.host_waits();
}

void DeviceAccelerator::before_compute(StreamHandle compute, int device) {
  devices_[size_t(device)]->uploads.compute_waits(compute, placed_layer_);
}

void DeviceAccelerator::after_compute(StreamHandle compute, int device) {
  devices_[size_t(device)]->uploads.follow_compute(compute);
}

void DeviceAccelerator::begin_table_step(StreamHandle compute) {
  if (devices_.size() > 1) throw std::logic_error("a table step is for one device");
  first().tables.begin_step(scheduler_.devices().cache(0), compute);
}

std::vector<uint32_t> DeviceAccelerator::read_prices() const {
  const auto ns = [](double us) {
    return uint32_t(std::min(std::round(us * 1e3), double(std::numeric_limits<uint32_t>::max())));
  };
  const CostModel& cost = scheduler_.cost();
  const DeviceCost& home = cost.home();
  const double chi = home.profile().contention;
  cuda::ReadPrices prices{};
  prices.reads = scheduler_.config().fetch_rule == FetchRule::kBestSplit;
  prices.launch_ns = ns(home.profile().gpu_launch_us);
  prices.handshake_ns = ns(home.profile().handshake_us);
  for (int n = 1; n <= cuda::kMostReadTokens; ++n) {
    const int passes = (n + cuda::kDecodeTokens - 1) / cuda::kDecodeTokens;
    prices.gpu_ns[n] = ns(home.gpu_expert_us(n));
    prices.link_ns[n] = ns(passes * home.upload_us());
    prices.cpu_ns[n] = ns(cost.cpu_expert_us(n));
    prices.slowed_ns[n] = ns(chi * cost.cpu_expert_us(n));
    prices.drag_ns[n] = ns(chi / (1 + chi) * passes * home.upload_us());
  }
  std::vector<uint32_t> words(cuda::kReadPriceWords);
  std::memcpy(words.data(), &prices, sizeof prices);
  return words;
}

LayerTimes DeviceAccelerator::follow(int layer, const LayerRouting& routing, const ExpertGroups& groups,
                                     std::span<const Placement> where) {
  first().tables.reached(layer);
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  const LayerDecision& decision = scheduler_.follow(
      {layer, {routing.ids, num_pairs}, {routing.weights, num_pairs}, routing.num_tokens}, where);
  record_decision(decision, layer, routing, groups);
  return decision.times;
}

void DeviceAccelerator::look_ahead(int layer, const LayerRouting& routing, std::span<const Placement> where,
                                   std::span<const float> logits) {
  first().tables.reached(layer);
  const size_t num_pairs = size_t(routing.num_tokens) * size_t(routing.top_k);
  scheduler_.predict(layer + 1, logits, routing.num_tokens);
  record_decision(scheduler_.look_ahead(layer, {routing.ids, num_pairs}, where), layer, routing, {});
}

std::span<const Publication> DeviceAccelerator::settle_ahead(int layer) {
  const LayerDecision& decision = scheduler_.settle_ahead(layer);
  record_decision(decision, layer, {}, {});
  for (const Publication& landed : decision.arrivals) first().tables.arrived(layer, landed.slot);
  return decision.arrivals;
}

void DeviceAccelerator::end_table_step(StreamHandle compute) {
  first().uploads.follow_compute(compute);
  first().tables.end_step();
}

}  // namespace twofold
