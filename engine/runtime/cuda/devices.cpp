#include "devices.h"

#include <cuda_runtime_api.h>

namespace twofold {

namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

// Stream memory operations are the driver's, and the runtime has no attribute for them: a driver that does not
// export them does not have them. The start-up probe checks whether they work on this device.
bool driver_exports(const char* symbol) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess && function != nullptr;
}

}  // namespace

std::vector<DeviceInfo> find_devices(std::string& reason) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    reason = cudaGetErrorString(error);
    return {};
  }
  reason = count > 0 ? "" : "the driver reports no device";
  std::vector<DeviceInfo> devices;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      (void)cudaGetLastError();
      continue;
    }
    DeviceInfo device;
    device.index = index;
    device.name = properties.name;
    device.compute_capability = 10 * properties.major + properties.minor;
    device.num_multiprocessors = properties.multiProcessorCount;
    device.total_bytes = properties.totalGlobalMem;
    device.l2_bytes = size_t(properties.l2CacheSize);
    device.can_map_host_memory = attribute(cudaDevAttrCanMapHostMemory, index) != 0;
    device.stream_memory_operations = driver_exports("cuStreamWaitValue32");
    devices.push_back(device);
  }
  return devices;
}

}  // namespace twofold
