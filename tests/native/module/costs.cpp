// Cost model and planners as tests see them. Exports only.
#include <pybind11/stl.h>

#include "tested.h"
#include "twofold/cost_model.h"
#include "twofold/decode_planner.h"
#include "twofold/machine_planner.h"
#include "twofold/prefill_planner.h"

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
                         const std::vector<double>& queued_us, bool one_transfer) {
  std::vector<DeviceWork> further;
  for (size_t d = 1; d < hits.size(); ++d)
    further.push_back({hits[d], fetched.at(d), backlog_us.at(d), queued_us.at(d), one_transfer});
  LayerWork work{hits.at(0), fetched.at(0), cpu, backlog_us.at(0), queued_us.at(0), one_transfer};
  work.further = further;
  return cost.layer(work);
}

void bind_cost_model(py::module_& m) {
  py::class_<LayerTimes>(m, "LayerTimes", "Predicted times of one layer, in microseconds from its start.")
      .def_readonly("layer_us", &LayerTimes::layer_us)
      .def_readonly("gpu_us", &LayerTimes::gpu_us)
      .def_readonly("cpu_us", &LayerTimes::cpu_us)
      .def_readonly("link_us", &LayerTimes::link_us)
      .def_readonly("dma_busy", &LayerTimes::dma_busy);

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
      .def("gpu_expert_us", &TestedCostModel::gpu_expert_us, py::arg("tokens"))
      .def("miss_us", &TestedCostModel::miss_us)
      .def(
          "gpu_us",
          [](const TestedCostModel& cost, const std::vector<int>& loads) { return cost.gpu_us(loads); },
          py::arg("loads"))
      .def(
          "layer",
          [](const TestedCostModel& cost, const std::vector<int>& hits, const std::vector<int>& fetched,
             const std::vector<int>& cpu, double backlog_us, double queued_us, bool one_transfer) {
            std::vector<double> landed(fetched.size());
            const LayerTimes times =
                cost.layer(LayerWork{hits, fetched, cpu, backlog_us, queued_us, one_transfer}, landed);
            return std::pair(times, landed);
          },
          py::arg("hits"), py::arg("fetched"), py::arg("cpu"), py::arg("backlog_us") = 0.0,
          py::arg("queued_us") = 0.0, py::arg("one_transfer") = false,
          "(LayerTimes, landing time of each fetched expert)")
      .def("machine_layer", &machine_layer, py::arg("hits"), py::arg("fetched"), py::arg("cpu"),
           py::arg("backlog_us"), py::arg("queued_us"), py::arg("one_transfer") = false,
           "LayerTimes of several devices; all but cpu have one entry per device.");
}

void bind_planners(py::module_& m) {
  py::class_<DecodePlanner>(m, "DecodePlanner", "How many of a layer's misses to fetch, by table.")
      .def(py::init<const CostModel&, int, int, double, double>(), py::arg("cost"), py::arg("max_routed"),
           py::arg("num_buckets") = 32, py::arg("bucket_us") = 0.0, py::arg("fetch_cost_us") = 0.0)
      .def_property_readonly("bucket_us", &DecodePlanner::bucket_us)
      .def_property_readonly("num_buckets", &DecodePlanner::num_buckets)
      .def("split", &DecodePlanner::split, py::arg("hits"), py::arg("misses"), py::arg("backlog_us"));

  py::class_<PrefillPlan>(m, "PrefillPlan", "Who runs what in one layer, by expert number.")
      .def_readonly("resident", &PrefillPlan::resident)
      .def_readonly("fetch", &PrefillPlan::fetch)
      .def_readonly("cpu", &PrefillPlan::cpu)
      .def_readonly("streamed", &PrefillPlan::streamed)
      .def_readonly("times", &PrefillPlan::times);

  py::class_<PrefillPlanner>(m, "PrefillPlanner", "Plans for layers whose experts carry unequal loads.")
      .def(py::init<const CostModel&>(), py::arg("cost"))
      .def(
          "plan",
          [](const PrefillPlanner& planner, const std::vector<int>& experts, const std::vector<int>& tokens,
             const std::vector<bool>& resident, double backlog_us, double queued_us, int max_fetch) {
            if (experts.size() != tokens.size() || experts.size() != resident.size()) {
              throw py::value_error("PrefillPlanner: experts, tokens and resident differ in length (" +
                                    std::to_string(experts.size()) + ", " + std::to_string(tokens.size()) +
                                    ", " + std::to_string(resident.size()) + ")");
            }
            std::vector<ExpertLoad> loads;
            for (size_t i = 0; i < experts.size(); ++i) loads.push_back({experts[i], tokens[i], resident[i]});
            return planner.plan(loads, backlog_us, queued_us, max_fetch);
          },
          py::arg("experts"), py::arg("tokens"), py::arg("resident"), py::arg("backlog_us") = 0.0,
          py::arg("queued_us") = 0.0, py::arg("max_fetch") = -1);
}

void bind_machine_planner(py::module_& m) {
  py::class_<MachineLoad>(m, "MachineLoad",
                          "An active expert of a layer; resident and barred: bits by device.")
      .def(py::init([](int expert, int tokens, uint32_t resident, uint32_t barred) {
             return MachineLoad{expert, tokens, resident, barred};
           }),
           py::arg("expert"), py::arg("tokens"), py::arg("resident") = 0, py::arg("barred") = 0);
  py::class_<DevicePlan>(m, "DevicePlan", "A device's share of a layer, by expert number.")
      .def_readonly("hits", &DevicePlan::hits)
      .def_readonly("fetch", &DevicePlan::fetch);
  py::class_<MachinePlan>(m, "MachinePlan", "Which lane runs what in one layer of several devices.")
      .def_readonly("devices", &MachinePlan::devices)
      .def_readonly("cpu", &MachinePlan::cpu)
      .def_readonly("streamed", &MachinePlan::streamed)
      .def_readonly("times", &MachinePlan::times);
  py::class_<MachinePlanner>(m, "MachinePlanner", "Plans layers of machines with several devices.")
      .def(py::init<const CostModel&, int>(), py::arg("cost"), py::arg("exact_up_to") = 12)
      .def(
          "plan",
          [](const MachinePlanner& planner, const std::vector<MachineLoad>& loads,
             const std::vector<std::tuple<double, double, int>>& devices, bool may_stream) {
            std::vector<DeviceState> states;
            for (const auto& [backlog_us, queued_us, max_fetch] : devices)
              states.push_back({backlog_us, queued_us, max_fetch});
            return planner.plan(loads, states, may_stream);
          },
          py::arg("loads"), py::arg("devices"), py::arg("may_stream"),
          "devices: (backlog_us, queued_us, max_fetch) of each.");
}

}  // namespace

void bind_tested_costs(py::module_& m) {
  bind_cost_model(m);
  bind_planners(m);
  bind_machine_planner(m);
}
}  // namespace twofold::bindings
