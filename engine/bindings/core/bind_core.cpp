// The scheduling core for Python: cost model and cache policies; other subjects are in files of their own.
// Exports only.
#include <pybind11/stl.h>

#include <tuple>

#include "module.h"
#include "twofold/cache_policy.h"
#include "twofold/cost_model.h"
#include "twofold/lane_planner.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// A layer on one device and the CPU, with an idle link.
double at_home_us(const CostModel& cost, const DeviceWork& work, const std::vector<int>& cpu) {
  std::vector<DeviceWork> devices(static_cast<size_t>(cost.num_devices()));
  devices.front() = work;
  return cost.layer({devices, cpu}).layer_us;
}

// Which of a layer's experts to stream to the first device, in the order of their uploads, and the layer's time so and
// with all experts on the CPU. Nothing is resident, and nothing stays.
std::tuple<std::vector<int>, double, double> plan_streams(const CostModel& cost,
                                                          const std::vector<int>& tokens) {
  std::vector<ExpertLoad> loads;
  std::vector<int> active;
  for (size_t e = 0; e < tokens.size(); ++e) {
    if (tokens[e] == 0) continue;
    loads.push_back({static_cast<int>(e), tokens[e]});
    active.push_back(tokens[e]);
  }
  const std::vector<DeviceState> devices(static_cast<size_t>(cost.num_devices()));
  const LanePlan plan = LanePlanner(cost).plan(loads, {devices}, false);
  const double on_cpu_us = cost.layer({std::vector<DeviceWork>(devices.size()), active}).layer_us;
  return {plan.devices.front().fetch, plan.times.layer_us, on_cpu_us};
}

void bind_cost_model(py::module_& m) {
  py::class_<MachineProfile>(m, "MachineProfile",
                             "Calibrated figures of one machine; units are in the names.")
      .def_static("from_fields", &MachineProfile::from_fields, py::arg("name"), py::arg("fields"))
      .def(
          "with_devices",
          [](const MachineProfile& machine, const std::vector<MachineProfile>& others) {
            return machine.with_devices(others);
          },
          py::arg("others"), "This machine with the devices of others, at this host.");

  py::class_<CostModel>(m, "CostModel", "How long one MoE layer takes for a given placement.")
      .def(py::init([](const MachineProfile& profile, double expert_bytes, double flops_per_token,
                       const std::vector<std::pair<double, double>>& cpu_curve) {
             std::vector<CurvePoint> curve;
             for (const auto& [tokens, us] : cpu_curve) curve.push_back({tokens, us});
             return CostModel(profile, expert_bytes, flops_per_token, std::move(curve));
           }),
           py::arg("profile"), py::arg("expert_bytes"), py::arg("flops_per_token"),
           py::arg("cpu_curve") = std::vector<std::pair<double, double>>{})
      .def("upload_us", [](const CostModel& cost) { return cost.home().upload_us(); })
      .def(
          "cpu_us",
          [](const CostModel& cost, const std::vector<int>& loads, double dma_busy) {
            return cost.cpu_us(loads, dma_busy);
          },
          py::arg("loads"), py::arg("dma_busy") = 0.0)
      .def("plan_streams", &plan_streams, py::arg("tokens"),
           "(experts to stream to the device, in order; microseconds of the layer so; and on the CPU alone) "
           "for the "
           "tokens of each expert, on a machine of one device.")
      .def(
          "decode_layer_us",
          [](const CostModel& cost, size_t num_hits, size_t num_fetched, size_t num_cpu) {
            const std::vector<int> hits(num_hits, 1), fetched(num_fetched, 1), cpu(num_cpu, 1);
            return at_home_us(cost, {hits, fetched}, cpu);
          },
          py::arg("num_hits"), py::arg("num_fetched"), py::arg("num_cpu"),
          "Layer time with one token per expert and an idle link.")
      .def(
          "layer_us",
          [](const CostModel& cost, const std::vector<int>& hits, const std::vector<int>& cpu) {
            return at_home_us(cost, {hits, {}}, cpu);
          },
          py::arg("hits"), py::arg("cpu"), "A layer without uploads, from the tokens of each expert.")
      .def(
          "machine_layer_us",
          [](const CostModel& cost, const std::vector<size_t>& num_hits, size_t num_cpu, int home) {
            if (num_hits.size() != static_cast<size_t>(cost.num_devices()))
              throw std::invalid_argument(std::to_string(num_hits.size()) +
                                          " numbers of hits given, one for each of " +
                                          std::to_string(cost.num_devices()) + " devices expected");
            std::vector<std::vector<int>> hits;
            for (const size_t count : num_hits) hits.emplace_back(count, 1);
            std::vector<DeviceWork> devices;
            for (const std::vector<int>& each : hits) devices.push_back({each, {}});
            const std::vector<int> cpu(num_cpu, 1);
            return cost.with_home(home).layer({devices, cpu}).layer_us;
          },
          py::arg("num_hits"), py::arg("num_cpu"), py::arg("home") = 0,
          "A layer without uploads and with one token per expert: hits of each device, misses of the CPU, "
          "the device "
          "that the layer begins and ends on.")
      .def("exchange_us", &CostModel::exchange_us, py::arg("from_device"), py::arg("to_device"))
      .def(
          "memory_us",
          [](const CostModel& cost, int device, double bytes) {
            return bytes / (cost.device(device).profile().vram_bandwidth_gbps * 1e3);
          },
          py::arg("device"), py::arg("bytes"), "Time to read these bytes from a device's memory.");
}

void bind_cache_policies(py::module_& m) {
  py::class_<CachePolicyEntry>(m, "CachePolicy", "What is known of a cache policy by name.")
      .def_readonly("name", &CachePolicyEntry::name)
      .def_readonly("offline", &CachePolicyEntry::offline)
      .def_readonly("pooled", &CachePolicyEntry::pooled)
      .def_property_readonly("prefetches",
                             [](const CachePolicyEntry& policy) {
                               return policy.prefetches == Prefetching::kAuto        ? "auto"
                                      : policy.prefetches == Prefetching::kOnRequest ? "asked"
                                                                                     : "never";
                             })
      .def_readonly("help", &CachePolicyEntry::help);
  m.def("cache_policies", [] {
    const auto all = cache_policies();
    return std::vector<CachePolicyEntry>(all.begin(), all.end());
  });
}

}  // namespace

void bind_core(py::module_& m) {
  bind_cost_model(m);
  bind_cache_policies(m);
  bind_core_scheduler(m);
  bind_core_lab(m);
}
}  // namespace twofold::bindings
