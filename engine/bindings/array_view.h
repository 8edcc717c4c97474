// NumPy array arguments of the core: converted to contiguous arrays of the requested type if needed.
#pragma once
#include <pybind11/numpy.h>

#include <span>

namespace twofold::bindings {

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>;

template <typename T>
std::span<const T> view(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

}  // namespace twofold::bindings
