// The CUDA runtime as a DeviceApi.
#pragma once
#include <memory>

#include "device/device_api.h"

namespace twofold {

// Every call works on this device, whichever one the thread had before. Throws DeviceError when there is no
// such device or it cannot be used.
std::shared_ptr<DeviceApi> open_cuda_device(int index);

}  // namespace twofold
