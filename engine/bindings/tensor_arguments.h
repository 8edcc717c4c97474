// numpy arrays as arguments of native operations: a TensorView of each without copy or conversion, and the
// errors of the operations as twofold.errors classes.
#pragma once
#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>

#include "tensor_view.h"

namespace twofold::bindings {

// A setting is wrong. Python sees twofold.errors.ConfigError.
class ConfigFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Lets KernelFailure and ConfigFailure arrive as KernelError and ConfigError. Call once, when the module is
// made.
void register_failures();

TensorView view_of(const pybind11::array& array);

}  // namespace twofold::bindings
