// The layer scheduler's and a replay's single decisions, as tests see them. Exports only.
#include <pybind11/stl.h>

#include "array_view.h"
#include "core/trace_holder.h"
#include "owning.h"
#include "tested.h"
#include "twofold/layer_scheduler.h"
#include "twofold/replay.h"
#include "twofold/timeline.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// The product's class with what only tests ask of it.
struct TestedScheduler : LayerScheduler {
  using LayerScheduler::LayerScheduler;
};

void bind_scheduler(py::module_& m) {
  py::class_<ExpertDecision>(m, "ExpertDecision", "Where one active expert of a layer runs.")
      .def_readonly("expert", &ExpertDecision::expert)
      .def_readonly("tokens", &ExpertDecision::tokens)
      .def_readonly("where", &ExpertDecision::where)
      .def_readonly("slot", &ExpertDecision::slot)
      .def_readonly("device", &ExpertDecision::device);
  py::class_<Move>(m, "Move", "One upload that a layer began or queued.")
      .def_readonly("layer", &Move::layer)
      .def_readonly("expert", &Move::expert)
      .def_readonly("slot", &Move::slot)
      .def_readonly("device", &Move::device)
      .def_readonly("evicted", &Move::evicted)
      .def_readonly("reason", &Move::reason)
      .def_readonly("begin_us", &Move::begin_us)
      .def_readonly("end_us", &Move::end_us);
  py::class_<LayerDecision>(m, "LayerDecision", "What was decided for one layer of one step.")
      .def_readonly("experts", &LayerDecision::experts)
      .def_readonly("moves", &LayerDecision::moves)
      .def_readonly("times", &LayerDecision::times)
      .def_readonly("start_us", &LayerDecision::start_us)
      .def_readonly("withdrawn", &LayerDecision::withdrawn)
      .def_property_readonly(
          "arrived",
          [](const LayerDecision& d) {
            std::vector<int> experts;
            for (const Publication& landed : d.arrivals) experts.push_back(landed.expert);
            return experts;
          },
          "Experts whose prefetch landed in time for this layer.");
  py::class_<TestedScheduler, LayerScheduler, std::shared_ptr<TestedScheduler>>(m, "LayerScheduler")
      .def(py::init(
               [](const CostModel& cost, const LayerSchedulerConfig& config, std::shared_ptr<Timeline> link) {
                 Link* const links[] = {link.get()};
                 return owning(std::make_unique<TestedScheduler>(cost, config, links), link);
               }),
           py::arg("cost"), py::arg("config"), py::arg("link"))
      .def(py::init([](const CostModel& cost, const LayerSchedulerConfig& config,
                       const std::vector<std::shared_ptr<Timeline>>& links) {
             std::vector<Link*> borrowed;
             for (const auto& link : links) borrowed.push_back(link.get());
             return owning(std::make_unique<TestedScheduler>(cost, config, borrowed), links);
           }),
           py::arg("cost"), py::arg("config"), py::arg("links"))
      .def(
          "decide",
          [](TestedScheduler& s, int layer, const Array<int32_t>& ids) {
            return s.decide({layer, view(ids), {}, ids.ndim() == 2 ? static_cast<int>(ids.shape(0)) : 0});
          },
          py::arg("layer"), py::arg("ids"))
      .def("drain", [](TestedScheduler& s) { s.devices().drain(); })
      .def_property_readonly("num_slots", [](const TestedScheduler& s) { return s.devices().num_slots(0); })
      .def("preload", [](TestedScheduler& s, int layer,
                         int expert) { return s.devices().cache(0).preload(layer, expert); })
      .def(
          "state",
          [](const TestedScheduler& s, int layer, int expert, int device) {
            return s.devices().cache(device).state(layer, expert);
          },
          py::arg("layer"), py::arg("expert"), py::arg("device") = 0)
      .def("occupant",
           [](const TestedScheduler& s, int slot) { return s.devices().cache(0).occupant(slot); });
}

void bind_replay(py::module_& m) {
  py::class_<ReplayDecision>(m, "ReplayDecision", "What happened to one active expert of one event.")
      .def_readonly("step", &ReplayDecision::step)
      .def_readonly("layer", &ReplayDecision::layer)
      .def_readonly("expert", &ReplayDecision::expert)
      .def_readonly("hit", &ReplayDecision::hit)
      .def_readonly("uploaded", &ReplayDecision::uploaded)
      .def_readonly("evicted", &ReplayDecision::evicted)
      .def_readonly("value", &ReplayDecision::value)
      .def_readonly("victim_value", &ReplayDecision::victim_value);

  m.def(
      "future_of", [](const TraceHolder& trace, int batch) { return future_of(trace.trace(), batch); },
      py::arg("trace"), py::arg("batch"));
  m.def(
      "replay_decisions",
      [](const TraceHolder& trace, int batch, ExpertCache& cache) {
        std::vector<ReplayDecision> decisions;
        const ReplayCounts counts =
            replay(trace.trace(), batch, cache, [&](const ReplayDecision& d) { decisions.push_back(d); });
        return std::pair(counts, decisions);
      },
      py::arg("trace"), py::arg("batch"), py::arg("cache"),
      "(ReplayCounts, every decision), for small traces.");
}

}  // namespace

void bind_tested_scheduler(py::module_& m) {
  bind_scheduler(m);
  bind_replay(m);
}
}  // namespace twofold::bindings
