#include "moe/emulated.h"

#include <algorithm>
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
              store_.layout(what.layer).bytes);
}

EmulatedAccelerator::EmulatedAccelerator(const ExpertStore& store, CostModel cost,
                                         LayerSchedulerConfig config, DenseCost dense_cost)
    : SlottedAccelerator(store, config),
      dense_cost_(std::move(dense_cost)),
      link_(store, cost.upload_us(), config.usable_slots() + config.staging_slots()),
      scheduler_(std::move(cost), std::move(config), link_) {
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

void EmulatedAccelerator::predict(int layer, std::span<const float> logits, int num_tokens) {
  // The extra router reads its gate; its launch is part of the step's graph.
  const double us = dense_cost_.router_bytes / (scheduler_.cost().profile().vram_bandwidth_gbps * 1e3);
  scheduler_.advance(us);
  parts_.dense_us += us;
  SlottedAccelerator::predict(layer, logits, num_tokens);
}

void EmulatedAccelerator::dense(int layer, int num_tokens) {
  const MachineProfile& machine = scheduler_.cost().profile();
  const double bytes_us = dense_cost_.bytes[size_t(layer)] / (machine.vram_bandwidth_gbps * 1e3);
  const double flops_us =
      dense_cost_.flops_per_token[size_t(layer)] * num_tokens / (machine.gpu_gflops * 1e3);
  const double us = machine.gpu_launch_us + std::max(bytes_us, flops_us) + cpu_dense_us(layer, num_tokens);
  scheduler_.advance(us);
  (layer < store().num_layers() ? parts_.dense_us : parts_.head_us) += us;
}

double EmulatedAccelerator::cpu_dense_us(int layer, int num_tokens) const {
  if (dense_cost_.handovers.empty()) return 0;
  const MachineProfile& machine = scheduler_.cost().profile();
  const size_t stretch = size_t(layer);
  const double bytes_us = dense_cost_.cpu_bytes[stretch] / (machine.cpu_bandwidth_gbps * 1e3);
  const double flops_us = dense_cost_.cpu_flops_per_token[stretch] * num_tokens / (machine.cpu_gflops * 1e3);
  return dense_cost_.handovers[stretch] * machine.handshake_us + std::max(bytes_us, flops_us);
}

void EmulatedAccelerator::decided(const LayerDecision& decision, std::span<GroupPlacement> /*placements*/) {
  const CostModel& cost = scheduler_.cost();
  double computing_us = 0;
  for (const ExpertDecision& e : decision.experts) {
    if (e.where == Placement::kCpu) continue;
    if (computing_us == 0) computing_us = cost.profile().gpu_launch_us;
    computing_us += cost.gpu_expert_us(e.tokens);
  }
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
