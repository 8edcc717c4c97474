// Cost model and planners as tests see them. Exports only.
#include <pybind11/stl.h>

#include "tested.h"
#include "twofold/cost_model.h"
#include "twofold/decode_planner.h"
#include "twofold/prefill_planner.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// The product's class with what only tests ask of it.
struct TestedCostModel : CostModel {
  using CostModel::CostModel;
};

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
          "(LayerTimes, landing time of each fetched expert)");
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

}  // namespace

void bind_tested_costs(py::module_& m) {
  bind_cost_model(m);
  bind_planners(m);
}
}  // namespace twofold::bindings
