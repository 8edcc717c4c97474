// Addresses and streams cross as integers: torch's data_ptr() and cuda_stream.
#pragma once
#include <cstdint>

#include "expert_layer.h"

namespace twofold::bindings {

template <typename T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
inline cuda::Stream stream_of(uint64_t stream) { return reinterpret_cast<cuda::Stream>(stream); }

}  // namespace twofold::bindings
