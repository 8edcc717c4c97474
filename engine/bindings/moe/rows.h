// Arrays of rows as experts take them, and how messages name their shapes.
#pragma once
#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>

namespace twofold::bindings {

using FloatRows = pybind11::array_t<float, pybind11::array::c_style>;
using IntRows = pybind11::array_t<int32_t, pybind11::array::c_style>;

inline std::string shape_text(const pybind11::array& a) { return pybind11::str(a.attr("shape")); }

inline void expect_shape(const pybind11::array& a, const char* name, pybind11::ssize_t rows,
                         pybind11::ssize_t columns) {
  if (a.ndim() != 2 || a.shape(0) != rows || a.shape(1) != columns) {
    throw std::invalid_argument(std::string(name) + " has shape " + shape_text(a) + ", expected (" +
                                std::to_string(rows) + ", " + std::to_string(columns) + ")");
  }
}

}  // namespace twofold::bindings
