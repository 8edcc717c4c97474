#include <pybind11/stl.h>

#include "moe/correction/layer_correction.h"
#include "moe/moe_executor.h"
#include "tested.h"

namespace twofold::bindings {
namespace py = pybind11;

void bind_tested_runtime(py::module_& m) {
  py::class_<LayerCorrection>(m, "LayerCorrection", "What predicted times of layers are off by now.")
      .def(py::init<int>(), py::arg("num_layers"))
      .def("factor", &LayerCorrection::factor, py::arg("layer"), py::arg("num_tokens"))
      .def("update", &LayerCorrection::update, py::arg("layer"), py::arg("num_tokens"),
           py::arg("predicted_us"), py::arg("measured_us"));
  m.def("needs_look_ahead", &MoeExecutor::needs_look_ahead, py::arg("executor"));
}

}  // namespace twofold::bindings

PYBIND11_MODULE(_testing, m) {
  m.doc() = "Single decisions and single kernels, for tests and kernels/bench.";
  pybind11::module_::import("twofold._core");  // the base classes of what follows
  twofold::bindings::bind_tested_costs(m);
  twofold::bindings::bind_tested_cache(m);
  twofold::bindings::bind_tested_scheduler(m);
  twofold::bindings::bind_tested_runtime(m);
  twofold::bindings::bind_tested_blocks(m);
  pybind11::module_ kernels = m.def_submodule("kernels", "One kernel of one level at a time.");
  twofold::bindings::bind_kernels(kernels);
  twofold::bindings::bind_packed_kernels(kernels);
  twofold::bindings::bind_delta_kernels(kernels);
}
