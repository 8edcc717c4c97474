// The prefetcher for tests and the lab. Exports only.
#include <pybind11/stl.h>

#include "module.h"
#include "twofold/prefetcher.h"

namespace twofold::bindings {
namespace py = pybind11;

void bind_core_prefetcher(py::module_& m) {
  py::class_<PrefetchRequest>(m, "PrefetchRequest", "A prediction: this expert, this probably, by then.")
      .def(py::init([](int layer, int expert, double probability, double deadline_us) {
             return PrefetchRequest{layer, expert, probability, deadline_us};
           }),
           py::arg("layer"), py::arg("expert"), py::arg("probability"), py::arg("deadline_us"))
      .def_readonly("layer", &PrefetchRequest::layer)
      .def_readonly("expert", &PrefetchRequest::expert)
      .def_readonly("probability", &PrefetchRequest::probability)
      .def_readonly("deadline_us", &PrefetchRequest::deadline_us);

  py::class_<PrefetchCounts>(m, "PrefetchCounts", "How many predictions were offered, issued and right.")
      .def_readonly("num_offered", &PrefetchCounts::num_offered)
      .def_readonly("num_refused", &PrefetchCounts::num_refused)
      .def_readonly("num_late", &PrefetchCounts::num_late)
      .def_readonly("num_issued", &PrefetchCounts::num_issued)
      .def_readonly("num_used", &PrefetchCounts::num_used)
      .def_property_readonly("precision", &PrefetchCounts::precision)
      .def_property_readonly("recall", &PrefetchCounts::recall);

  py::class_<Prefetcher>(m, "Prefetcher", "Earliest deadline first, priced, late work dropped.")
      .def(py::init<int, int, double, std::vector<double>>(), py::arg("num_layers"), py::arg("num_experts"),
           py::arg("price"), py::arg("layer_weight") = std::vector<double>{})
      .def("offer", [](Prefetcher& p, const std::vector<PrefetchRequest>& requests) { p.offer(requests); })
      .def("next", &Prefetcher::next, py::arg("now_us"), py::arg("upload_us"))
      .def(
          "settle",
          [](Prefetcher& p, int layer, const std::vector<int>& routed, const std::vector<int>& misses) {
            p.settle(layer, routed, misses);
          },
          py::arg("layer"), py::arg("routed"), py::arg("misses"))
      .def("clear", &Prefetcher::clear)
      .def_property_readonly("num_queued", &Prefetcher::num_queued)
      .def_property_readonly("counts", &Prefetcher::counts);
}
}  // namespace twofold::bindings
