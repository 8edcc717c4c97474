// Forward and backward of routed experts in training.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "module.h"
#include "moe/rows.h"
#include "moe/training/expert_training.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

// (a [experts, rank, columns], b [experts, rows, rank], scale) of gate, up and down; None: not trained.
using FactorArguments = std::vector<py::object>;
// By expert: 1 where another lane computes it; empty: none.
using Elsewhere = std::vector<uint8_t>;

class __attribute__((visibility("hidden"))) BoundExpertTraining {
 public:
  BoundExpertTraining(const PoolView& pool, std::shared_ptr<ExpertStore> store)
      : pool_(pool), store_(std::move(store)), training_(pool_, *store_) {}

  // y, and what backward reads (None unless asked for).
  py::tuple forward(int layer, const FloatRows& x, const IntRows& ids, const FloatRows& weights,
                    const FactorArguments& factors, bool keep, const Elsewhere& elsewhere) {
    const TrainedLayer of = layer_of(layer, x, ids, weights, factors, elsewhere);
    py::array_t<float> y({x.shape(0), x.shape(1)});
    float* const to = y.mutable_data();
    auto kept = std::make_shared<KeptRows>();
    {
      const py::gil_scoped_release release;
      training_.forward(of, to, keep ? kept.get() : nullptr);
    }
    return py::make_tuple(y, kept);
  }

  py::tuple backward(int layer, const FloatRows& x, const IntRows& ids, const FloatRows& weights,
                     const FactorArguments& factors, const FloatRows& dy,
                     const std::shared_ptr<KeptRows>& kept, const Elsewhere& elsewhere) {
    const TrainedLayer of = layer_of(layer, x, ids, weights, factors, elsewhere);
    expect_f32(view_of(dy), "ExpertTraining.backward: dy", {x.shape(0), x.shape(1)});
    py::array_t<float> dx({x.shape(0), x.shape(1)}), dweights({weights.shape(0), weights.shape(1)});
    ExpertTraining::Gradients gradients{dx.mutable_data(), dweights.mutable_data(), {}};
    py::list of_factors;
    for (size_t m = 0; m < 3; ++m) {
      if (factors[m].is_none()) {
        of_factors.append(py::none());
        continue;
      }
      py::array_t<float> da = zeros_like(factors[m], 0), db = zeros_like(factors[m], 1);
      gradients.factors[m] = {da.mutable_data(), db.mutable_data()};
      of_factors.append(py::make_tuple(da, db));
    }
    {
      const py::gil_scoped_release release;
      training_.backward(of, dy.data(), *kept, gradients);
    }
    return py::make_tuple(dx, dweights, of_factors);
  }

 private:
  static py::array_t<float> zeros_like(const py::object& factors, size_t index) {
    const auto like = factors.cast<py::tuple>()[index].cast<py::array>();
    py::array_t<float> made(std::vector<py::ssize_t>(like.shape(), like.shape() + like.ndim()));
    std::fill_n(made.mutable_data(), made.size(), 0.0f);
    return made;
  }

  TrainedLayer layer_of(int layer, const FloatRows& x, const IntRows& ids, const FloatRows& weights,
                        const FactorArguments& factors, const Elsewhere& elsewhere) const {
    const int hidden = store_->shape().hidden, inner = store_->shape().intermediate;
    if (factors.size() != 3) throw KernelFailure("ExpertTraining: factors are of gate, up and down");
    expect_f32(view_of(x), "ExpertTraining: x", {kAny, hidden});
    expect_shape(ids, "ids", x.shape(0), ids.shape(1));
    expect_shape(weights, "weights", x.shape(0), ids.shape(1));
    TrainedLayer of{
        layer,
        {ids.data(), weights.data(), static_cast<int>(x.shape(0)), static_cast<int>(ids.shape(1))},
        x.data(),
        {},
        {elsewhere.data(), elsewhere.size()}};
    for (int m = 0; m < 3; ++m) {
      if (factors[size_t(m)].is_none()) continue;
      const auto given = factors[size_t(m)].cast<py::tuple>();
      const auto a = given[0].cast<py::array>(), b = given[1].cast<py::array>();
      const int rows = m == 2 ? hidden : inner, columns = m == 2 ? inner : hidden;
      const TensorView of_a = view_of(a), of_b = view_of(b);
      const float* const down = expect_f32(of_a, "ExpertTraining: a", {store_->num_experts(), kAny, columns});
      const int64_t rank = of_a.shape[1];
      const float* const up = expect_f32(of_b, "ExpertTraining: b", {store_->num_experts(), rows, rank});
      of.factors[m] = {down, up, static_cast<int>(rank), given[2].cast<float>()};
    }
    return of;
  }

  PoolView pool_;
  std::shared_ptr<ExpertStore> store_;
  ExpertTraining training_;
};

}  // namespace

void bind_training(py::module_& m) {
  py::class_<KeptRows, std::shared_ptr<KeptRows>>(m, "KeptRows", "What backward reads of a forward.")
      .def_property_readonly("num_bytes", [](const KeptRows& kept) {
        return sizeof(float) * (kept.gate.size() + kept.up.size());
      });
  py::class_<BoundExpertTraining>(
      m, "ExpertTraining", "Routed experts in training: forward and backward in float32 over packed weights.")
      .def(py::init<const PoolView&, std::shared_ptr<ExpertStore>>(), py::arg("pool"), py::arg("store"))
      .def("forward", &BoundExpertTraining::forward, py::arg("layer"), py::arg("x").noconvert(),
           py::arg("ids").noconvert(), py::arg("weights").noconvert(), py::arg("factors"), py::arg("keep"),
           py::arg("elsewhere") = Elsewhere{},
           "(y [tokens, hidden], KeptRows) for x float32 [tokens, hidden], ids int32 and weights float32 "
           "[tokens, "
           "top_k]. factors: of gate, up and down, None or (a [experts, rank, columns], b [experts, rows, "
           "rank], "
           "scale). Without keep nothing is kept, and backward computes it again. elsewhere: by expert, 1 "
           "where "
           "another lane computes it; empty: none.")
      .def("backward", &BoundExpertTraining::backward, py::arg("layer"), py::arg("x").noconvert(),
           py::arg("ids").noconvert(), py::arg("weights").noconvert(), py::arg("factors"),
           py::arg("dy").noconvert(), py::arg("kept"), py::arg("elsewhere") = Elsewhere{},
           "(dx, dweights, [None or (da, db)] * 3) for dy, the gradient of y.");
}

}  // namespace twofold::bindings
