// The layer scheduler with its prefetcher, as docs/prefetch.md's simulation plays it. Exports only.
#include <pybind11/stl.h>

#include "array_view.h"
#include "module.h"
#include "twofold/layer_scheduler.h"

namespace twofold::bindings {
namespace py = pybind11;

void bind_core_scheduler(py::module_& m) {
  py::class_<PrefetchCounts>(m, "PrefetchCounts", "Sums since the start.")
      .def_readonly("predicted", &PrefetchCounts::predicted)
      .def_readonly("correct", &PrefetchCounts::correct)
      .def_readonly("misses", &PrefetchCounts::misses)
      .def_readonly("foreseen", &PrefetchCounts::foreseen)
      .def_readonly("issued", &PrefetchCounts::issued)
      .def_readonly("used", &PrefetchCounts::used)
      .def_readonly("late", &PrefetchCounts::late)
      .def_readonly("wasted", &PrefetchCounts::wasted)
      .def_readonly("dropped", &PrefetchCounts::dropped);
  py::class_<LayerScheduler>(m, "LayerScheduler", "Decides and plays layers of decode steps.")
      .def(py::init([](const CostModel& cost, int num_layers, int num_experts, int top_k, int num_slots,
                       const std::string& policy, bool prefetch) {
             LayerSchedulerConfig config;
             config.num_layers = num_layers;
             config.num_experts = num_experts;
             config.top_k = top_k;
             config.num_slots = num_slots;
             config.policy = policy;
             config.prefetch = prefetch;
             return std::make_unique<LayerScheduler>(cost, std::move(config));
           }),
           py::arg("cost"), py::arg("num_layers"), py::arg("num_experts"), py::arg("top_k"),
           py::arg("num_slots"), py::arg("policy") = "payback", py::arg("prefetch") = false)
      .def("begin_step", [](LayerScheduler& s) { s.begin_step(StepShape{{}, 0, 1}); })
      .def(
          "predict",
          [](LayerScheduler& s, int layer, const Array<float>& logits) {
            s.predict(layer, view(logits), logits.ndim() == 2 ? static_cast<int>(logits.shape(0)) : 0);
          },
          py::arg("layer"), py::arg("logits"))
      .def(
          "decide",
          [](LayerScheduler& s, int layer, const Array<int32_t>& ids) {
            s.decide(layer, view(ids), {}, ids.ndim() == 2 ? static_cast<int>(ids.shape(0)) : 0);
          },
          py::arg("layer"), py::arg("ids"))
      .def("advance", &LayerScheduler::advance, py::arg("us"))
      .def_property_readonly("now_us", &LayerScheduler::now_us)
      .def_property_readonly("prefetch_counts", &LayerScheduler::prefetch_counts);
}

}  // namespace twofold::bindings
