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

constexpr int kKernelsNeed = 8;  // major compute capability: cp.async and mma.sync with bf16

std::string dotted(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

// Why a driver cannot run this module's CUDA; empty if it can. Within a major version every driver can.
std::string driver_problem(int driver_cuda) {
  if (driver_cuda == 0) return "there is no libcuda.so.1; install the NVIDIA driver";
  constexpr int kMajor = CUDART_VERSION / 1000;
  if (driver_cuda / 1000 >= kMajor) return "";
  // CUDA Toolkit Release Notes, "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility".
  const char* least = kMajor == 13 ? " to 580 or newer" : kMajor == 12 ? " to 525 or newer" : "";
  return "the NVIDIA driver is too old: it has CUDA " + dotted(driver_cuda / 1000, driver_cuda % 1000 / 10) +
         ", this build needs " + dotted(kMajor, 0) + "; update the driver" + least +
         ", or build from source with a CUDA toolkit that it has";
}

}  // namespace

std::vector<DeviceInfo> find_devices(std::string& reason) {
  int driver_cuda = 0, count = 0;
  (void)cudaDriverGetVersion(&driver_cuda);
  if (reason = driver_problem(driver_cuda); !reason.empty()) return {};
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    reason = std::string(cudaGetErrorString(error)) + "; look at nvidia-smi and CUDA_VISIBLE_DEVICES";
    return {};
  }
  reason = "the driver reports no device; look at nvidia-smi and CUDA_VISIBLE_DEVICES";
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
    if (device.compute_capability < TWOFOLD_OLDEST_ARCHITECTURE) {
      reason = device.name + " has compute capability " + dotted(properties.major, properties.minor) +
               ", this build needs " +
               dotted(TWOFOLD_OLDEST_ARCHITECTURE / 10, TWOFOLD_OLDEST_ARCHITECTURE % 10) +
               (properties.major < kKernelsNeed ? "; use a newer GPU" : "; build Twofold on this machine");
      continue;
    }
    device.num_multiprocessors = properties.multiProcessorCount;
    device.total_bytes = properties.totalGlobalMem;
    device.l2_bytes = size_t(properties.l2CacheSize);
    device.can_map_host_memory = attribute(cudaDevAttrCanMapHostMemory, index) != 0;
    device.stream_memory_operations = driver_exports("cuStreamWaitValue32");
    devices.push_back(device);
  }
  if (!devices.empty()) reason.clear();
  return devices;
}

}  // namespace twofold
