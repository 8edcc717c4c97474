#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "module.h"
#include "moe/routing_counts.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

template <typename T>
py::array_t<T> array_of(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
  py::array_t<T> array(std::move(shape));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

py::array_t<int64_t> take(RoutingCounts& counts) {
  return array_of(counts.take(), {kNumPlacements, counts.num_layers(), counts.num_experts()});
}

// The last step: its number, requests and positions [tokens], experts and placements [layers, tokens, top_k].
py::object take_step(RoutingCounts& counts) {
  const StepRouting step = counts.take_step();
  const py::ssize_t num_tokens = py::ssize_t(step.rows.requests.size());
  if (num_tokens == 0 || step.top_k == 0) return py::none();
  const std::vector<py::ssize_t> shape{counts.num_layers(), num_tokens, step.top_k};
  return py::dict(
      py::arg("step") = step.rows.step, py::arg("requests") = array_of(step.rows.requests, {num_tokens}),
      py::arg("positions") = array_of(step.rows.positions, {num_tokens}),
      py::arg("experts") = array_of(step.experts, shape), py::arg("placement") = array_of(step.where, shape));
}

}  // namespace

void bind_routing_counts(py::module_& m) {
  py::native_enum<RoutingDetail>(m, "RoutingDetail", "enum.IntEnum")
      .value("OFF", RoutingDetail::kOff)
      .value("COUNTS", RoutingDetail::kCounts)
      .value("TOKENS", RoutingDetail::kTokens)
      .finalize();
  py::class_<RoutingCounts>(m, "RoutingCounts", "How often each expert was routed to, by where it ran.")
      .def("start", &RoutingCounts::start, py::arg("detail"), py::arg("every") = 1)
      .def_property_readonly("detail", &RoutingCounts::detail)
      .def_property_readonly("num_steps", &RoutingCounts::num_steps)
      .def_property_readonly("num_tokens", &RoutingCounts::num_tokens)
      .def("take", &take)
      .def("take_step", &take_step);
}

}  // namespace twofold::bindings
