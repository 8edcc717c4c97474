#include "moe/emulated.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

EmulatedLink::EmulatedLink(const ExpertStore& store, double upload_us, int num_slots)
    : Timeline(upload_us),
      store_(store),
      stride_(round_up(store.expert_bytes(), kCacheLine)),
      arena_(size_t(std::max(num_slots, 1)) * stride_) {}

Upload EmulatedLink::upload(const Transfer& what, UploadLane lane, double duration_us) {
  fill(what);
  return Timeline::upload(what, lane, duration_us);
}

void EmulatedLink::fill(const Transfer& what) {
  std::memcpy(arena_.data() + size_t(what.slot) * stride_, store_.expert(what.layer, what.expert),
              store_.layout(what.layer, what.expert).bytes);
}

namespace {

std::vector<std::unique_ptr<EmulatedLink>> links_of(const ExpertStore& store, const CostModel& cost,
                                                    const LayerSchedulerConfig& config) {
  std::vector<std::unique_ptr<EmulatedLink>> links;
  for (int d = 0; d < config.num_devices() && d < cost.num_devices(); ++d) {
    links.push_back(std::make_unique<EmulatedLink>(store, cost.device(d).upload_us(),
                                                   config.usable_slots(d) + config.staging_slots()));
  }
  return links;
}

std::vector<Link*> borrowed(const std::vector<std::unique_ptr<EmulatedLink>>& links) {
  std::vector<Link*> out;
  for (const auto& link : links) out.push_back(link.get());
  return out;
}

}  // namespace

EmulatedAccelerator::EmulatedAccelerator(const ExpertStore& store, CostModel cost,
                                         LayerSchedulerConfig config, DenseCost dense_cost)
    : SlottedAccelerator(store, config),
      dense_cost_(std::move(dense_cost)),
      links_(links_of(store, cost, config)),
      scheduler_(std::move(cost), std::move(config), borrowed(links_)) {
  const size_t expected = size_t(store.num_layers()) + 1;
  if (dense_cost_.bytes.size() != expected || dense_cost_.flops_per_token.size() != expected) {
    throw std::invalid_argument("dense costs are needed for " + std::to_string(expected) +
                                " stretches (one before each MoE layer, one after the last); given " +
                                std::to_string(dense_cost_.bytes.size()));
  }
  for (const auto* of_cpu :
       {&dense_cost_.cpu_bytes, &dense_cost_.cpu_flops_per_token, &dense_cost_.handovers}) {
    if (of_cpu->size() != dense_cost_.handovers.size() || (!of_cpu->empty() && of_cpu->size() != expected))
      throw std::invalid_argument("the CPU's dense costs are needed for all " + std::to_string(expected) +
                                  " stretches or none; given " + std::to_string(of_cpu->size()));
  }
}

size_t EmulatedAccelerator::device_bytes() const {
  size_t total = 0;
  for (const auto& link : links_) total += link->bytes();
  return total;
}

void EmulatedAccelerator::predict(int layer, std::span<const float> logits, int num_tokens) {
  // The extra router reads its gate; its launch is part of the step's graph.
  const DeviceProfile& home = scheduler_.cost().device(scheduler_.config().home(layer)).profile();
  const double us = dense_cost_.router_bytes / (home.vram_bandwidth_gbps * 1e3);
  scheduler_.devices().advance(us);
  parts_.dense_us += us;
  SlottedAccelerator::predict(layer, logits, num_tokens);
}

void EmulatedAccelerator::dense(int layer, int num_tokens) {
  const bool is_head = layer == store().num_layers();
  const LayerSchedulerConfig& config = scheduler_.config();
  const int home = is_head ? 0 : config.home(layer), before = layer == 0 ? 0 : config.home(layer - 1);
  const DeviceProfile& device = scheduler_.cost().device(home).profile();
  const double bytes_us = dense_cost_.bytes[size_t(layer)] / (device.vram_bandwidth_gbps * 1e3);
  const double flops_us = dense_cost_.flops_per_token[size_t(layer)] * num_tokens / (device.gpu_gflops * 1e3);
  const double us = scheduler_.cost().exchange_us(before, home) + device.gpu_launch_us +
                    std::max(bytes_us, flops_us) + cpu_dense_us(layer, num_tokens);
  scheduler_.devices().advance(us);
  (is_head ? parts_.head_us : parts_.dense_us) += us;
}

double EmulatedAccelerator::cpu_dense_us(int layer, int num_tokens) const {
  if (dense_cost_.handovers.empty()) return 0;
  const HostProfile& host = scheduler_.cost().profile().host;
  const size_t stretch = size_t(layer);
  const double bytes_us = dense_cost_.cpu_bytes[stretch] / (host.cpu_bandwidth_gbps * 1e3);
  const double flops_us = dense_cost_.cpu_flops_per_token[stretch] * num_tokens / (host.cpu_gflops * 1e3);
  return dense_cost_.handovers[stretch] * scheduler_.cost().home().profile().handshake_us +
         std::max(bytes_us, flops_us);
}

void EmulatedAccelerator::decided(const LayerDecision& decision, std::span<GroupPlacement> /*placements*/) {
  std::array<double, kMostDevices> of_device{};
  for (const ExpertDecision& e : decision.experts) {
    if (e.where == Placement::kCpu) continue;
    const DeviceCost& cost = scheduler_.cost().device(e.device);
    double& us = of_device[size_t(e.device)];
    if (us == 0) us = cost.exchange_us() + cost.profile().gpu_launch_us;
    us += cost.gpu_expert_us(e.tokens);
  }
  const double computing_us = *std::max_element(of_device.begin(), of_device.end());
  const LayerTimes& times = decision.times;
  const bool cpu_was_last = times.cpu_us > times.gpu_us;
  const double waited_us = std::max(times.gpu_us - computing_us, 0.0);
  const double link_us = cpu_was_last ? 0.0 : waited_us;
  const double cpu_us = cpu_was_last ? times.cpu_us - std::min(computing_us, times.cpu_us) : 0.0;
  parts_.link_us += link_us;
  parts_.experts_cpu_us += cpu_us;
  parts_.experts_gpu_us += times.layer_us - link_us - cpu_us;
}

}  // namespace twofold
