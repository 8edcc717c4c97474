// One function per subject; each lives in a bind_*.cpp of its own.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "expert_layer.h"

namespace twofold::bindings {

void bind_experts(pybind11::module_& m);    // encoding, grouping, expert kernels
void bind_dense(pybind11::module_& m);      // routing, rotation and KV store, decode attention
void bind_hand_over(pybind11::module_& m);  // mailbox, steps, probe

// Addresses and streams cross as whole numbers: torch's data_ptr() and cuda_stream.
template <typename T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
inline cuda::Stream stream_of(uint64_t stream) { return reinterpret_cast<cuda::Stream>(stream); }

}  // namespace twofold::bindings
