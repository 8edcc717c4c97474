// kernels/cuda/gpu/machine.cuh on the SIMT machine: the same functions.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "twofold/numbers.h"

namespace twofold::kernels {

// Exact: a half's significand has 11 bits.
TWOFOLD_HD float f16_instruction(uint16_t half) { return float(__builtin_bit_cast(_Float16, half)); }

}  // namespace twofold::kernels

namespace twofold::cuda {

template <class... Parameters, class... Arguments>
int launch_named(const char* instance, const char* text, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                 int64_t shared_bytes, cudaStream_t, const Arguments&... arguments) {
  struct Bound {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } bound{kernel, {arguments...}};
  const auto call = [](const void* memory) {
    const Bound& at = *static_cast<const Bound*>(memory);
    std::apply(at.kernel, at.arguments);
  };
  return simt::run({text, instance, reinterpret_cast<const void*>(kernel), call, &bound, sizeof bound},
                   {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes);
}
// The text of the call names the kernel in reports.
#define launch(...) launch_named(__PRETTY_FUNCTION__, #__VA_ARGS__, __VA_ARGS__)

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(simt::dynamic_memory());
}
template <class T>
T& static_shared() {
  static const char key = 0;
  return *static_cast<T*>(simt::static_memory(&key, sizeof(T), alignof(T)));
}

using simt::close_copies;
using simt::load_acquire;
using simt::nanoseconds;
using simt::store_release;
__forceinline__ void copy_16(void* shared, const void* global, bool there) {
  simt::begin_copy(shared, global, there);
}
template <int kLeft>
void wait_copies() {
  simt::wait_copies(kLeft);
}
__forceinline__ void multiply_fragments(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&c)[4],
                                        int line = __builtin_LINE()) {
  simt::multiply(a, b, c, line);
}

}  // namespace twofold::cuda
