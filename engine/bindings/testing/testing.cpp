#include "testing/testing.h"

#include <pybind11/stl.h>

#include "module.h"
#include "moe/layer_correction.h"
#include "moe/moe_executor.h"

namespace twofold::bindings {
namespace py = pybind11;

void bind_tested_runtime(py::module_& m) {
  py::class_<LayerCorrection>(m, "LayerCorrection", "What predicted times of layers are off by now.")
      .def(py::init<int>(), py::arg("num_layers"))
      .def("factor", &LayerCorrection::factor, py::arg("layer"), py::arg("num_tokens"))
      .def("update", &LayerCorrection::update, py::arg("layer"), py::arg("num_tokens"),
           py::arg("predicted_us"), py::arg("measured_us"));
  m.def("wants_prediction", &MoeExecutor::wants_prediction, py::arg("executor"));
}

void bind_testing(py::module_& m) {
  py::module_ testing = m.def_submodule("testing", "What only tests and kernels/bench call.");
  bind_tested_costs(testing);
  bind_tested_cache(testing);
  bind_tested_scheduler(testing);
  bind_tested_runtime(testing);
  py::module_ kernels = testing.def_submodule("kernels", "One kernel of one level at a time.");
  bind_kernels(kernels);
  bind_packed_kernels(kernels);
  bind_delta_kernels(kernels);
}

}  // namespace twofold::bindings
