// The CUDA runtime as a DeviceApi.
#pragma once
#include <memory>

#include "device/device_api.h"

namespace twofold {

// Every call works on this device and leaves the thread's current one as it was. Throws DeviceError when there is no
// such device or it cannot be used.
std::shared_ptr<DeviceApi> open_cuda_device(int index);

}  // namespace twofold
