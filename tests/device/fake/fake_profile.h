// Cost model inputs for a machine with a fake device.
#pragma once
#include "twofold/cost_model.h"

namespace twofold::fake {

inline MachineProfile machine_profile() {
  return {.name = "fake",
          .host = {.cpu_bandwidth_gbps = 0.05, .cpu_gflops = 1e3, .cpu_expert_overhead_us = 1},
          .devices = {{.handshake_us = 5,
                       .gpu_launch_us = 2,
                       .vram_bandwidth_gbps = 100,
                       .gpu_gflops = 1e5,
                       .link_latency_us = 4,
                       .link_bandwidth_gbps = 0.1,
                       .contention = 0.2,
                       .join_us = 1}}};
}

}  // namespace twofold::fake
