// The CUDA devices of this machine. Without a driver the list is empty, which is no error.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace twofold {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int num_multiprocessors = 0;
  size_t total_bytes = 0;
  size_t l2_bytes = 0;
  bool can_map_host_memory = false;
  bool stream_memory_operations = false;  // a stream can wait for a word in memory
};

// Devices that this build's kernels run on, in CUDA's order. `reason` explains an empty list: what was found, what is
// needed, what to do.
std::vector<DeviceInfo> find_devices(std::string& reason);

}  // namespace twofold
