#pragma once
#include <pybind11/pybind11.h>

namespace twofold::bindings {

// What a module that has devices exports beside its way to open one: class Device, and the runtime's errors
// as KernelError and CapacityError. Imports twofold._core, whose types it uses.
void bind_device(pybind11::module_& m);

}  // namespace twofold::bindings
