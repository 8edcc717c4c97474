// The gated delta net's kernels of a named level.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "tensor_arguments.h"
#include "tested.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

// Carries state [K, kDeltaColumns] over the tokens and returns their outputs.
py::array_t<float> delta_rule(const py::array& q, const py::array& k, const py::array& v,
                              const py::array& decay, const py::array& beta, const py::array& state,
                              const std::string& level) {
  const TensorView keys = view_of(k);
  const float* key = expect_f32(keys, "kernels.delta_rule: k", {kAny, kAny});
  const int64_t T = keys.shape[0], K = keys.shape[1];
  const float* query = expect_f32(view_of(q), "kernels.delta_rule: q", {T, K});
  std::vector<float> products(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = 0; i < K; ++i) products[static_cast<size_t>(t)] += key[t * K + i] * query[t * K + i];
  }
  py::array_t<float> out({T, int64_t{kernels::kDeltaColumns}});
  const kernels::DeltaTokens tokens{
      .q = query,
      .k = key,
      .key_stride = K,
      .v = expect_f32(view_of(v), "kernels.delta_rule: v", {T, kernels::kDeltaColumns}),
      .out = out.mutable_data(),
      .value_stride = kernels::kDeltaColumns,
      .decay = expect_f32(view_of(decay), "kernels.delta_rule: decay", {T}),
      .beta = expect_f32(view_of(beta), "kernels.delta_rule: beta", {T}),
      .kq = products.data(),
      .gate_stride = 1};
  float* carried =
      expect_writable_f32(view_of(state), "kernels.delta_rule: state", {K, kernels::kDeltaColumns});
  level_named(level).delta->delta_rule(tokens, static_cast<int>(T), carried, static_cast<int>(K));
  return out;
}

// x [taps - 1 rows before the first, then the tokens; n], w [taps, n].
py::array_t<float> short_convolution(const py::array& x, const py::array& w, const std::string& level) {
  const TensorView xs = view_of(x), ws = view_of(w);
  const float* weights = expect_f32(ws, "kernels.short_convolution: w", {kAny, kAny});
  const int64_t taps = ws.shape[0], n = ws.shape[1];
  const float* rows = expect_f32(xs, "kernels.short_convolution: x", {kAny, n});
  const int64_t T = xs.shape[0] - taps + 1;
  py::array_t<float> out({T, n});
  for (int64_t t = 0; t < T; ++t) {
    std::vector<const float*> of_token;
    for (int64_t j = 0; j < taps; ++j) of_token.push_back(rows + (t + j) * n);
    level_named(level).delta->short_convolution(of_token.data(), static_cast<int>(taps), weights, n,
                                                out.mutable_data() + t * n, static_cast<int>(n));
  }
  return out;
}

void sigmoid_multiply(const py::array& x, const py::array& y, const std::string& level) {
  const TensorView view = view_of(x);
  const float* row = expect_f32(view, "kernels.sigmoid_multiply: x", {kAny});
  float* out = expect_writable_f32(view_of(y), "kernels.sigmoid_multiply: y", {view.shape[0]});
  level_named(level).delta->sigmoid_multiply(row, out, static_cast<int>(view.shape[0]));
}

}  // namespace

void bind_delta_kernels(py::module_& m) {
  m.def("delta_columns", [] { return kernels::kDeltaColumns; });
  m.def("delta_rule", &delta_rule, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("decay"),
        py::arg("beta"), py::arg("state"), py::kw_only(), py::arg("level"));
  m.def("short_convolution", &short_convolution, py::arg("x"), py::arg("w"), py::kw_only(), py::arg("level"));
  m.def("sigmoid_multiply", &sigmoid_multiply, py::arg("x"), py::arg("y"), py::kw_only(), py::arg("level"));
}

}  // namespace twofold::bindings
