// Panel information exported where matrices and stores are bound.
#pragma once
#include <pybind11/numpy.h>

#include <cstddef>

namespace twofold::bindings {
// A view that keeps `owner` alive.
pybind11::array_t<uint8_t> read_only_bytes(const std::byte* bytes, size_t count,
                                           const pybind11::object& owner);
}  // namespace twofold::bindings
