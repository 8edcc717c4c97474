#pragma once
#include <pybind11/pybind11.h>

namespace twofold::bindings {
void bind_device_launches(pybind11::module_& m);  // the submodule `device`
void bind_dense_launches(pybind11::module_& m);   // called by bind_device_launches
}  // namespace twofold::bindings
