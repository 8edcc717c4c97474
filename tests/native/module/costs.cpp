// Cost model and planners as tests see them. Exports only.
#include <pybind11/stl.h>

#include "tested.h"
#include "twofold/cost_model.h"
#include "twofold/lane_planner.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// The product's class with what only tests ask of it.
struct TestedCostModel : CostModel {
  using CostModel::CostModel;
};

using LoadsByDevice = std::vector<std::vector<int>>;

LayerTimes machine_layer(const TestedCostModel& cost, const LoadsByDevice& hits, const LoadsByDevice& fetched,
                         const std::vector<int>& cpu, const std::vector<double>& backlog_us,
                         const std::vector<double>& queued_us, bool one_transfer,
                         const std::vector<int>& deferred, double cpu_backlog_us) {
  std::vector<DeviceWork> devices;
  for (size_t d = 0; d < hits.size(); ++d)
    devices.push_back({hits[d], fetched.at(d), backlog_us.at(d), queued_us.at(d), one_transfer});
  return cost.layer({devices, cpu, deferred, cpu_backlog_us});
}

void bind_cost_model(py::module_& m) {
  py::class_<LayerTimes>(m, "LayerTimes", "Predicted times of one layer, in microseconds from its start.")
      .def_readonly("layer_us", &LayerTimes::layer_us)
      .def_readonly("gpu_us", &LayerTimes::gpu_us)
      .def_readonly("cpu_us", &LayerTimes::cpu_us)
      .def_readonly("link_us", &LayerTimes::link_us)
      .def_readonly("dma_busy", &LayerTimes::dma_busy)
      .def_readonly("cpu_end_us", &LayerTimes::cpu_end_us);

  py::class_<TestedCostModel, CostModel>(m, "CostModel")
      .def(py::init([](const MachineProfile& profile, double expert_bytes, double flops_per_token,
                       const std::vector<std::pair<double, double>>& cpu_curve) {
             std::vector<CurvePoint> curve;
             for (const auto& [tokens, us] : cpu_curve) curve.push_back({tokens, us});
             return TestedCostModel(profile, expert_bytes, flops_per_token, std::move(curve));
           }),
           py::arg("profile"), py::arg("expert_bytes"), py::arg("flops_per_token"),
           py::arg("cpu_curve") = std::vector<std::pair<double, double>>{})
      .def("cpu_expert_us", &TestedCostModel::cpu_expert_us, py::arg("tokens"))
      .def("with_adapters", &TestedCostModel::with_adapters, py::arg("bytes"))
      .def(
          "gpu_expert_us",
          [](const TestedCostModel& cost, int tokens) { return cost.home().gpu_expert_us(tokens); },
          py::arg("tokens"))
      .def(
          "upload_us_of",
          [](const TestedCostModel& cost, int device) { return cost.device(device).upload_us(); },
          py::arg("device"))
      .def("miss_us", [](const TestedCostModel& cost) { return cost.home().miss_us(); })
      .def(
          "layer",
          [](const TestedCostModel& cost, const std::vector<int>& hits, const std::vector<int>& fetched,
             const std::vector<int>& cpu, double backlog_us, double queued_us, bool one_transfer) {
            std::vector<double> landed(fetched.size());
            const DeviceWork device{hits, fetched, backlog_us, queued_us, one_transfer};
            cost.home().times(device, landed);
            return std::pair(cost.layer({{&device, 1}, cpu}), landed);
          },
          py::arg("hits"), py::arg("fetched"), py::arg("cpu"), py::arg("backlog_us") = 0.0,
          py::arg("queued_us") = 0.0, py::arg("one_transfer") = false,
          "(LayerTimes, landing time of each fetched expert)")
      .def("machine_layer", &machine_layer, py::arg("hits"), py::arg("fetched"), py::arg("cpu"),
           py::arg("backlog_us"), py::arg("queued_us"), py::arg("one_transfer") = false,
           py::arg("deferred") = std::vector<int>{}, py::arg("cpu_backlog_us") = 0.0,
           "LayerTimes of several devices; those of devices have one entry per device.");
}

void bind_planner(py::module_& m) {
  py::class_<ExpertLoad>(m, "ExpertLoad", "An active expert of a layer; resident and barred: bits by device.")
      .def(py::init([](int expert, int tokens, uint32_t resident, uint32_t barred, bool deferrable) {
             return ExpertLoad{expert, tokens, resident, barred, deferrable};
           }),
           py::arg("expert"), py::arg("tokens"), py::arg("resident") = 0, py::arg("barred") = 0,
           py::arg("deferrable") = false);
  py::class_<DeviceLane>(m, "DeviceLane", "A device's share of a layer, by expert number.")
      .def_readonly("hits", &DeviceLane::hits)
      .def_readonly("fetch", &DeviceLane::fetch);
  py::class_<LanePlan>(m, "LanePlan", "Which lane runs what in one layer.")
      .def_readonly("devices", &LanePlan::devices)
      .def_readonly("cpu", &LanePlan::cpu)
      .def_readonly("streamed", &LanePlan::streamed)
      .def_readonly("times", &LanePlan::times);
  py::class_<LanePlanner>(m, "LanePlanner", "Plans the lanes of a layer.")
      .def(py::init<const CostModel&, int>(), py::arg("cost"),
           py::arg("exact_up_to") = LanePlanner::kExactUpTo)
      .def(
          "plan",
          [](const LanePlanner& planner, const std::vector<ExpertLoad>& loads,
             const std::vector<std::tuple<double, double, int>>& devices, bool may_stream,
             double cpu_backlog_us, double gap_us) {
            std::vector<DeviceState> states;
            for (const auto& [backlog_us, queued_us, max_fetch] : devices)
              states.push_back({backlog_us, queued_us, max_fetch});
            return planner.plan(loads, {states, cpu_backlog_us, gap_us}, may_stream);
          },
          py::arg("loads"), py::arg("devices"), py::arg("may_stream"), py::arg("cpu_backlog_us") = 0.0,
          py::arg("gap_us") = 0.0, "devices: (backlog_us, queued_us, max_fetch) of each.");
  py::class_<SplitMemo>(m, "SplitMemo", "How many of one token's misses to fetch, looked up.")
      .def(py::init<const CostModel&, int>(), py::arg("cost"), py::arg("max_routed"))
      .def_property_readonly("bucket_us", &SplitMemo::bucket_us)
      .def_property_readonly_static("num_buckets", [](const py::object&) { return SplitMemo::kNumBuckets; })
      .def("split", &SplitMemo::split, py::arg("hits"), py::arg("misses"), py::arg("in_flight"),
           py::arg("backlog_us"));
}

}  // namespace

void bind_tested_costs(py::module_& m) {
  bind_cost_model(m);
  bind_planner(m);
}
}  // namespace twofold::bindings
