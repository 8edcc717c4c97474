// Replay of recorded routing, for the lab. Exports only.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "array_view.h"
#include "module.h"
#include "twofold/replay.h"
#include "twofold/simulation.h"
#include "twofold/timeline.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// Owns the arrays that the views of RoutingTrace point into.
class TraceHolder {
 public:
  TraceHolder(Array<uint16_t> ids, std::optional<Array<float>> weights, Array<int64_t> offsets,
              int num_experts)
      : ids_(std::move(ids)), weights_(std::move(weights)), offsets_(std::move(offsets)) {
    if (ids_.ndim() != 3) {
      throw py::value_error("routing trace: ids of " + std::to_string(ids_.ndim()) +
                            " dimensions given, [tokens, layers, top_k] expected");
    }
    trace_.num_tokens = ids_.shape(0);
    trace_.num_layers = static_cast<int>(ids_.shape(1));
    trace_.top_k = static_cast<int>(ids_.shape(2));
    trace_.num_experts = num_experts;
    trace_.ids = {ids_.data(), static_cast<size_t>(ids_.size())};
    if (weights_) trace_.weights = {weights_->data(), static_cast<size_t>(weights_->size())};
    trace_.offsets = {offsets_.data(), static_cast<size_t>(offsets_.size())};
    trace_.validate();
  }
  const RoutingTrace& trace() const { return trace_; }

 private:
  Array<uint16_t> ids_;
  std::optional<Array<float>> weights_;
  Array<int64_t> offsets_;
  RoutingTrace trace_;
};

void bind_simulation(py::module_& m) {
  py::class_<SimulationResult>(m, "SimulationResult",
                               "Sums over one simulated decode; times in microseconds.")
      .def_readonly("num_steps", &SimulationResult::num_steps)
      .def_readonly("num_tokens", &SimulationResult::num_tokens)
      .def_readonly("num_hits", &SimulationResult::num_hits)
      .def_readonly("num_cpu", &SimulationResult::num_cpu)
      .def_readonly("num_fetched", &SimulationResult::num_fetched)
      .def_readonly("num_uploads", &SimulationResult::num_uploads)
      .def_readonly("num_evictions", &SimulationResult::num_evictions)
      .def_readonly("total_us", &SimulationResult::total_us)
      .def_readonly("moe_us", &SimulationResult::moe_us)
      .def_readonly("cpu_us", &SimulationResult::cpu_us)
      .def_readonly("gpu_us", &SimulationResult::gpu_us)
      .def_readonly("link_us", &SimulationResult::link_us)
      .def_property_readonly("layer_us", [](const SimulationResult& r) {
        return py::array_t<float>(static_cast<py::ssize_t>(r.layer_us.size()), r.layer_us.data());
      });
  m.def(
      "simulate",
      [](const TraceHolder& trace, int batch, const CostModel& cost, const LayerSchedulerConfig& config,
         const std::vector<double>& dense_us, bool keep_layer_us, int prompt_chunk,
         const std::vector<double>& token_us) {
        Timeline link(cost.upload_us());
        LayerScheduler scheduler(cost, config, link);
        if (!config.prior_usage.empty()) scheduler.cache().preload_by_usage();
        py::gil_scoped_release release;
        if (prompt_chunk > 0)
          return simulate_prompts(trace.trace(), prompt_chunk, scheduler, dense_us, token_us, keep_layer_us);
        return simulate(trace.trace(), batch, scheduler, dense_us, keep_layer_us);
      },
      py::arg("trace"), py::arg("batch"), py::arg("cost"), py::arg("config"), py::arg("dense_us"),
      py::arg("keep_layer_us") = false, py::arg("prompt_chunk") = 0,
      py::arg("token_us") = std::vector<double>{},
      "Plays a trace on the virtual clock; with prior_usage the slots are filled before the start. "
      "prompt_chunk: sequences are prompts, so many tokens a step.");
  m.def("default_upload_price", &default_upload_price, py::arg("cost"));
}

}  // namespace

void bind_core_lab(py::module_& m) {
  py::class_<TraceHolder>(m, "RoutingTrace",
                          "Recorded routing: ids u16[tokens, layers, top_k], checked once.")
      .def(py::init<Array<uint16_t>, std::optional<Array<float>>, Array<int64_t>, int>(), py::arg("ids"),
           py::arg("weights"), py::arg("offsets"), py::arg("num_experts"))
      .def_property_readonly("num_tokens", [](const TraceHolder& t) { return t.trace().num_tokens; })
      .def_property_readonly("num_layers", [](const TraceHolder& t) { return t.trace().num_layers; })
      .def_property_readonly("num_experts", [](const TraceHolder& t) { return t.trace().num_experts; })
      .def_property_readonly("top_k", [](const TraceHolder& t) { return t.trace().top_k; })
      .def(
          "future", [](const TraceHolder& t, int batch) { return future_of(t.trace(), batch); },
          py::arg("batch"));

  py::class_<ReplayCounts>(m, "ReplayCounts",
                           "Sums over one replay; hits and misses count distinct experts per event.")
      .def_readonly("num_steps", &ReplayCounts::num_steps)
      .def_readonly("num_tokens", &ReplayCounts::num_tokens)
      .def_readonly("num_events", &ReplayCounts::num_events)
      .def_readonly("num_hits", &ReplayCounts::num_hits)
      .def_readonly("num_misses", &ReplayCounts::num_misses)
      .def_readonly("num_uploads", &ReplayCounts::num_uploads)
      .def_readonly("num_evictions", &ReplayCounts::num_evictions);

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
      "replay",
      [](const TraceHolder& trace, int batch, ExpertCache& cache) {
        py::gil_scoped_release release;
        return replay(trace.trace(), batch, cache);
      },
      py::arg("trace"), py::arg("batch"), py::arg("cache"),
      "Plays a trace through a cache; returns ReplayCounts.");
  m.def(
      "replay_decisions",
      [](const TraceHolder& trace, int batch, ExpertCache& cache) {
        std::vector<ReplayDecision> decisions;
        const ReplayCounts counts =
            replay(trace.trace(), batch, cache, [&](const ReplayDecision& d) { decisions.push_back(d); });
        return std::pair(counts, decisions);
      },
      py::arg("trace"), py::arg("batch"), py::arg("cache"),
      "The same with every decision; for small traces.");
  bind_simulation(m);
}
}  // namespace twofold::bindings
