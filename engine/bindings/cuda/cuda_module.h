// Exports of the CUDA module only; those shared with the fake device are in device/bind_device.h.
#pragma once
#include <pybind11/pybind11.h>

namespace twofold::bindings {

void bind_dense(pybind11::module_& m);  // routing, rotation and KV store, decode attention
void bind_mla(pybind11::module_& m);    // latent attention
void bind_delta(pybind11::module_& m);  // gated delta nets

}  // namespace twofold::bindings
