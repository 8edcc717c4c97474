// What every module that has devices exports, beside its way to open one. One function per subject; each
// lives in a bind_*.cpp of its own. Classes are local to the module: the tests' fake device is a second one
// with the same. Behind the launchers (expert_layer.h, step_control.h) and DeviceMailbox stands what the
// module is linked with: CUDA, or the fake device. What launchers are told of a layer is _core.device.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>

#include "device/device_api.h"

namespace twofold::bindings {

using DeviceClass = pybind11::class_<DeviceApi, std::shared_ptr<DeviceApi>>;

// class Device with all of the following, and the runtime's errors as KernelError and CapacityError. Imports
// twofold._core, whose types it uses.
void bind_device(pybind11::module_& m);
void bind_experts(DeviceClass& device);                           // encoding, expert kernels, their sum
void bind_handshake(pybind11::module_& m, DeviceClass& device);   // mailbox, placing, probe
void bind_table_step(pybind11::module_& m, DeviceClass& device);  // the host's part of a step placed there

}  // namespace twofold::bindings
