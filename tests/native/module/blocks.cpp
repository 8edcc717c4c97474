// Single blocks outside a decoder, with what they hand on to one another.
#include "moe/blocks.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "tensor_arguments.h"
#include "tested.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

void route(Block& block, const py::array& hidden, const py::array& normed, const py::array& ids,
           const py::array& weights, const std::optional<py::array>& logits) {
  Router& router = dynamic_cast<RouterBlock&>(block).router();
  const TensorView view = view_of(hidden);
  const float* x = expect_f32(view, "route: hidden", {kAny, router.hidden_size()});
  const int64_t T = view.shape[0];
  float* rows = expect_writable_f32(view_of(normed), "route: normed", {T, router.hidden_size()});
  int32_t* chosen = expect_writable_i32(view_of(ids), "route: ids", {T, router.top_k()});
  float* shares = expect_writable_f32(view_of(weights), "route: weights", {T, router.top_k()});
  float* scores =
      logits ? expect_writable_f32(view_of(*logits), "route: logits", {T, router.num_experts()}) : nullptr;
  router.forward(x, rows, chosen, shares, scores, static_cast<int>(T));
}

void add_shared_experts(Block& block, const py::array& sum, const py::array& normed) {
  const TensorView view = view_of(sum);
  float* rows = expect_writable_f32(view, "add_shared_experts: sum", {kAny, block.hidden_size()});
  const float* x =
      expect_f32(view_of(normed), "add_shared_experts: normed", {view.shape[0], block.hidden_size()});
  dynamic_cast<SharedExperts&>(block).forward(rows, x, static_cast<int>(view.shape[0]));
}

}  // namespace

void bind_tested_blocks(py::module_& m) {
  m.def("route", &route, py::arg("router"), py::arg("hidden"), py::arg("normed"), py::arg("ids"),
        py::arg("weights"), py::arg("logits") = py::none());
  m.def("add_shared_experts", &add_shared_experts, py::arg("block"), py::arg("sum"), py::arg("normed"));
}

}  // namespace twofold::bindings
