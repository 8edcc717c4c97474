#include "moe/emulated.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

EmulatedAccelerator::EmulatedAccelerator(const ExpertStore& store, CostModel cost,
                                         LayerSchedulerConfig config, DenseCost dense_cost)
    : SlottedAccelerator(store),
      dense_cost_(std::move(dense_cost)),
      slot_stride_((store.expert_bytes() + 63) / 64 * 64) {
  const size_t expected = size_t(store.num_layers()) + 1;
  if (dense_cost_.bytes.size() != expected || dense_cost_.flops_per_token.size() != expected) {
    throw std::invalid_argument("dense costs are needed for " + std::to_string(expected) +
                                " stretches (one before each MoE layer, one after the last); given " +
                                std::to_string(dense_cost_.bytes.size()));
  }
  use(std::make_unique<LayerScheduler>(std::move(cost), std::move(config)));
  const int num_places = std::max(scheduler().num_slots() + scheduler().num_staging(), 1);
  arena_ = PageMemory(size_t(num_places) * slot_stride_);
}

void EmulatedAccelerator::predict(int layer, std::span<const float> logits, int num_tokens) {
  // The extra router reads its gate; its launch is part of the step's graph.
  const double us = dense_cost_.router_bytes / (scheduler().cost().profile().vram_bandwidth_gbps * 1e3);
  scheduler().advance(us);
  parts_.dense_us += us;
  scheduler().predict(layer, logits, num_tokens);
}

void EmulatedAccelerator::dense(int layer, int num_tokens) {
  const MachineProfile& machine = scheduler().cost().profile();
  const double bytes_us = dense_cost_.bytes[size_t(layer)] / (machine.vram_bandwidth_gbps * 1e3);
  const double flops_us =
      dense_cost_.flops_per_token[size_t(layer)] * num_tokens / (machine.gpu_gflops * 1e3);
  const double us = machine.gpu_launch_us + std::max(bytes_us, flops_us);
  scheduler().advance(us);
  (layer < store().num_layers() ? parts_.dense_us : parts_.head_us) += us;
}

void EmulatedAccelerator::decided(const LayerDecision& decision, std::span<GroupPlacement> /*placements*/) {
  const CostModel& cost = scheduler().cost();
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

void EmulatedAccelerator::fill_slot(int layer, int expert, int slot_index) {
  std::memcpy(arena_.data() + size_t(slot_index) * slot_stride_, store().expert(layer, expert),
              store().layout(layer).bytes);
}

}  // namespace twofold
