// Single blocks outside a decoder, with what they hand on to one another.
#include "moe/blocks.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "ops/attention/parts/selection.h"
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

// Chooses the tokens with the largest first elements of the block's input, in steps of a quarter. A plane of one float
// keeps them.
class LargestInputs final : public Chooser {
 public:
  explicit LargestInputs(int hidden_size) : hidden_size_(hidden_size) {}

  int num_planes() const override { return 1; }
  void choose(const ChooserInput& input, const AttentionBatch& batch, const StateCache& cache, int layer,
              ChosenPositions& chosen) override {
    const StatePlane& plane = cache.planes(layer).back();
    const auto kept = [&](int64_t row) -> float& {
      return *reinterpret_cast<float*>(plane.base + row * plane.row_bytes);
    };
    const int page_size = cache.page_size(), T = batch.num_tokens();
    for (int t = 0; t < T; ++t)
      kept(batch.row(t, page_size)) = std::floor(4 * input.hidden[int64_t{t} * hidden_size_]);
    for (int t = 0; t < T; ++t) {
      std::vector<float> scores;
      for (int p = 0; p <= batch.position(t); ++p)
        scores.push_back(kept(int64_t{batch.pages(t)[p / page_size]} * page_size + p % page_size));
      chosen.keep_top(t, scores.data(), static_cast<int>(scores.size()));
    }
  }

 private:
  int hidden_size_;
};

}  // namespace

void bind_tested_blocks(py::module_& m) {
  m.def("route", &route, py::arg("router"), py::arg("hidden"), py::arg("normed"), py::arg("ids"),
        py::arg("weights"), py::arg("logits") = py::none());
  py::class_<LargestInputs, Chooser, std::shared_ptr<LargestInputs>>(m, "LargestInputs")
      .def(py::init<int>(), py::arg("hidden_size"));
  m.def("add_shared_experts", &add_shared_experts, py::arg("block"), py::arg("sum"), py::arg("normed"));
}

}  // namespace twofold::bindings
