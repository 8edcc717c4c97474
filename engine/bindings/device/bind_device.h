// Exports common to every device module, beside its way to open a device. One function per subject; each lives
// in a bind_*.cpp of its own. Classes are local to the module: the tests' fake device is a second module with
// the same ones. The launchers (expert_layer.h, step_control.h) and DeviceMailbox are implemented by what the
// module is linked with: CUDA, or the fake device. The launchers' layer arguments are in _core.device.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>

#include "device/device_api.h"

namespace twofold::bindings {

using DeviceClass = pybind11::class_<DeviceApi, std::shared_ptr<DeviceApi>>;

// class Device with all of the following, and the runtime's errors as KernelError and CapacityError. Imports
// twofold._core, whose types it uses.
void bind_device(pybind11::module_& m);
void bind_dense(DeviceClass& device);                          // routing, rotation, attention, delta nets
void bind_experts(pybind11::module_& m, DeviceClass& device);  // encoding, expert kernels, their sum, streams
void bind_handshake(pybind11::module_& m, DeviceClass& device);   // mailbox, placing, probe
void bind_table_step(pybind11::module_& m, DeviceClass& device);  // the host's part of a step placed there

}  // namespace twofold::bindings
