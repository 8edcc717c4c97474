// numpy arrays as arguments of native operations: a TensorView of each without copy or conversion, and the
// errors of the operations as twofold.api.errors classes.
#pragma once
#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>

#include "ops/packed_matrix.h"
#include "ops/tensor_view.h"

namespace twofold::bindings {

// A setting is wrong. Python sees twofold.api.errors.ConfigError.
class ConfigFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Lets KernelFailure and ConfigFailure arrive as KernelError and ConfigError. Call once, when the module is
// made.
void register_failures();

TensorView view_of(const pybind11::array& array);

// The format of the given name in files, flags and messages; ConfigFailure for an unknown one.
kernels::WeightFormat format_named(const std::string& name);

// A twofold.weights.weight_format.WeightMatrix (data, format, columns, scales), checked, without a copy: the
// arrays must outlive the result. `what` begins messages. Throws KernelFailure.
SourceMatrix source_matrix(const pybind11::handle& matrix, const std::string& what);

}  // namespace twofold::bindings
