// Replay of recorded routing, for the lab. Exports only.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <vector>

#include "core/trace_holder.h"
#include "module.h"
#include "twofold/simulation.h"
#include "twofold/timeline.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// The links of all devices, on virtual clocks.
class Timelines {
 public:
  explicit Timelines(const CostModel& cost) {
    for (int d = 0; d < cost.num_devices(); ++d) {
      links_.push_back(std::make_unique<Timeline>(cost.device(d).upload_us()));
      borrowed_.push_back(links_.back().get());
    }
  }
  std::span<Link* const> borrowed() const { return borrowed_; }

 private:
  std::vector<std::unique_ptr<Timeline>> links_;
  std::vector<Link*> borrowed_;
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
      .def_readonly("num_prompt_tokens", &SimulationResult::num_prompt_tokens)
      .def_readonly("prompt_us", &SimulationResult::prompt_us)
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
         const std::vector<double>& token_us, int prompt_tokens) {
        Timelines links(cost);
        LayerScheduler scheduler(cost, config, links.borrowed());
        if (!config.prior_usage.empty()) scheduler.preload_by_usage();
        py::gil_scoped_release release;
        if (prompt_tokens > 0) {
          return simulate_requests(trace.trace(), prompt_tokens, scheduler, dense_us, token_us,
                                   keep_layer_us);
        }
        if (prompt_chunk > 0)
          return simulate_prompts(trace.trace(), prompt_chunk, scheduler, dense_us, token_us, keep_layer_us);
        return simulate(trace.trace(), batch, scheduler, dense_us, keep_layer_us);
      },
      py::arg("trace"), py::arg("batch"), py::arg("cost"), py::arg("config"), py::arg("dense_us"),
      py::arg("keep_layer_us") = false, py::arg("prompt_chunk") = 0,
      py::arg("token_us") = std::vector<double>{}, py::arg("prompt_tokens") = 0,
      "Plays a trace on the virtual clock; with prior_usage the slots are filled before the start. "
      "prompt_chunk: sequences are prompts, so many tokens a step. prompt_tokens: each sequence is a request "
      "of so many prompt tokens, the others are decoded.");
  m.def(
      "simulate_steps",
      [](const TraceHolder& trace, const CostModel& cost, const LayerSchedulerConfig& config,
         const std::vector<double>& dense_us, const NextRows& next_rows) {
        Timelines links(cost);
        LayerScheduler scheduler(cost, config, links.borrowed());
        if (!config.prior_usage.empty()) scheduler.preload_by_usage();
        return simulate_steps(trace.trace(), scheduler, dense_us, next_rows);
      },
      py::arg("trace"), py::arg("cost"), py::arg("config"), py::arg("dense_us"), py::arg("next_rows"),
      "Plays decode steps that next_rows composes: given the sums so far, it returns the trace rows of the "
      "next "
      "step, the newest token's first, then those of drafts; an empty list ends the simulation.");
  m.def(
      "simulate_recorded",
      [](const TraceHolder& trace, const Array<int64_t>& begins, const Array<int64_t>& requests,
         const Array<int32_t>& positions, const Array<uint8_t>& decodes, const Array<uint16_t>& expected,
         int64_t first_counted, const Array<uint8_t>& residents, const CostModel& cost,
         const LayerSchedulerConfig& config, const std::vector<double>& dense_us,
         const std::vector<double>& token_us) {
        Timelines links(cost);
        LayerScheduler scheduler(cost, config, links.borrowed());
        const auto experts = static_cast<size_t>(config.num_experts);
        if (size_t(residents.size()) != static_cast<size_t>(config.num_layers) * experts)
          throw py::value_error("simulate: residents of [num_layers, num_experts] expected");
        for (size_t cell = 0; cell < size_t(residents.size()); ++cell) {
          if (residents.data()[cell] != 0)
            scheduler.devices().cache(0).preload(int(cell / experts), int(cell % experts));
        }
        const RecordedSteps steps{view(begins), view(requests), view(positions), view(decodes),
                                  view(expected)};
        py::gil_scoped_release release;
        return simulate_recorded(trace.trace(), steps, first_counted, scheduler, dense_us, token_us);
      },
      py::arg("trace"), py::arg("begins"), py::arg("requests"), py::arg("positions"), py::arg("decodes"),
      py::arg("expected"), py::arg("first_counted"), py::arg("residents"), py::arg("cost"), py::arg("config"),
      py::arg("dense_us"), py::arg("token_us") = std::vector<double>{},
      "Plays the steps that a run recorded: step i is rows begins[i] to begins[i + 1] of the trace, with a "
      "request "
      "and a position per row. decodes [steps]: without prompt tokens. expected [tokens, layers, top_k]: "
      "experts that "
      "the router of the layer before expects; empty without prefetch. residents [layers, experts]: those in "
      "slots "
      "before the first step. Sums over the decode steps from first_counted on.");
  m.def(
      "default_upload_price", [](const CostModel& cost) { return default_upload_price(cost.home()); },
      py::arg("cost"));
}

}  // namespace

void bind_core_lab(py::module_& m) {
  py::class_<TraceHolder>(m, "RoutingTrace",
                          "Recorded routing: ids u16[tokens, layers, top_k], checked once.")
      .def(py::init<Array<uint16_t>, std::optional<Array<float>>, Array<int64_t>, int>(), py::arg("ids"),
           py::arg("weights"), py::arg("offsets"), py::arg("num_experts"));

  py::class_<ReplayCounts>(m, "ReplayCounts",
                           "Sums over one replay; hits and misses count distinct experts per event.")
      .def_readonly("num_steps", &ReplayCounts::num_steps)
      .def_readonly("num_tokens", &ReplayCounts::num_tokens)
      .def_readonly("num_events", &ReplayCounts::num_events)
      .def_readonly("num_hits", &ReplayCounts::num_hits)
      .def_readonly("num_misses", &ReplayCounts::num_misses)
      .def_readonly("num_uploads", &ReplayCounts::num_uploads)
      .def_readonly("num_evictions", &ReplayCounts::num_evictions);

  m.def(
      "replay",
      [](const TraceHolder& trace, int batch, int num_slots, const std::string& policy, double upload_price,
         std::vector<double> prior_usage, std::optional<bool> shared_pool, const TraceHolder* warm_up) {
        const RoutingTrace& played = trace.trace();
        CacheConfig config;
        config.num_layers = played.num_layers;
        config.num_experts = played.num_experts;
        config.top_k = played.top_k;
        config.slots_per_layer = spread_slots(num_slots, played.num_layers, played.num_experts);
        config.policy = policy;
        config.upload_price = upload_price;
        config.prior_usage = std::move(prior_usage);
        config.shared_pool = shared_pool;
        const auto cache = std::make_unique<ExpertCache>(std::move(config));
        py::gil_scoped_release release;
        if (cache->policy().prefetches == Prefetching::kNever) preload_by_usage(*cache);
        if (warm_up != nullptr && !cache->policy().offline) replay(warm_up->trace(), batch, *cache);
        return replay(played, batch, *cache);
      },
      py::arg("trace"), py::arg("batch"), py::arg("num_slots"), py::arg("policy"), py::arg("upload_price"),
      py::arg("prior_usage") = std::vector<double>{}, py::arg("shared_pool") = py::none(),
      py::arg("warm_up") = py::none(),
      "Plays a trace through a new cache, empty but for a policy that moves nothing: that one starts with "
      "the "
      "most used of prior_usage. warm_up is played first and not counted (online policies only).");
  bind_simulation(m);
}
}  // namespace twofold::bindings
