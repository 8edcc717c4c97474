// What every module that has devices exports, beside its way to open one. One function per subject; each
// lives in a bind_*.cpp of its own. Classes are local to the module: the tests' fake device is a second one
// with the same. Behind the launchers (expert_layer.h, step_control.h) and DeviceMailbox stands what the
// module is linked with: CUDA, or a fake device.
#pragma once
#include <pybind11/pybind11.h>

namespace twofold::bindings {

// class Device, and the runtime's errors as KernelError and CapacityError. Imports twofold._core, whose types
// it uses.
void bind_device(pybind11::module_& m);
void bind_experts(pybind11::module_& m);     // encoding, grouping, expert kernels
void bind_hand_over(pybind11::module_& m);   // mailbox, steps, probe
void bind_table_step(pybind11::module_& m);  // the host's part of a step that the device places

}  // namespace twofold::bindings
