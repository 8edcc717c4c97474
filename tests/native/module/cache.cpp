// Expert cache, virtual clock and event ring as tests see them. Exports only.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <numeric>

#include "array_view.h"
#include "core/layer_pins.h"
#include "tested.h"
#include "twofold/event_ring.h"
#include "twofold/expert_cache.h"
#include "twofold/timeline.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

// The product's class with what only tests ask of it.
struct TestedTimeline : Timeline {
  using Timeline::Timeline;
};

void bind_timeline(py::module_& m) {
  py::enum_<UploadLane>(m, "UploadLane")
      .value("DEMAND", UploadLane::kDemand)
      .value("BACKGROUND", UploadLane::kBackground);
  py::class_<Upload>(m, "Upload", "One copy over the link; times are of the virtual clock.")
      .def_property_readonly("tag", [](const Upload& u) { return u.what.slot; })
      .def_readonly("lane", &Upload::lane)
      .def_readonly("queued_us", &Upload::queued_us)
      .def_readonly("begin_us", &Upload::begin_us)
      .def_readonly("end_us", &Upload::end_us);

  py::class_<TestedTimeline, Timeline, std::shared_ptr<TestedTimeline>>(m, "Timeline")
      .def(py::init<double>(), py::arg("upload_us"))
      .def_property_readonly("now_us", &TestedTimeline::now_us)
      .def_property_readonly("backlog_us", &TestedTimeline::backlog_us)
      .def_property_readonly("queued_us", &TestedTimeline::queued_us)
      .def_property_readonly("num_waiting", &TestedTimeline::num_waiting)
      .def(
          "upload",
          [](TestedTimeline& t, int tag, UploadLane lane, double duration_us) {
            return t.upload({.slot = tag}, lane, duration_us);
          },
          py::arg("tag"), py::arg("lane") = UploadLane::kDemand, py::arg("duration_us") = -1.0)
      .def("cancel_background", &TestedTimeline::cancel_background, py::arg("tag"))
      .def("advance", &TestedTimeline::advance, py::arg("us"))
      .def("take_landed", &TestedTimeline::take_landed)
      .def("drain", &TestedTimeline::drain);
}

CacheConfig cache_config(int num_layers, int num_experts, int top_k, std::vector<int> slots_per_layer,
                         std::string policy, double upload_price, std::optional<bool> shared_pool,
                         std::vector<double> prior_usage, const std::vector<std::string>& pins) {
  CacheConfig config;
  config.pins = pins_of(pins);
  config.num_layers = num_layers;
  config.num_experts = num_experts;
  config.top_k = top_k;
  config.slots_per_layer = std::move(slots_per_layer);
  config.policy = std::move(policy);
  config.upload_price = upload_price;
  config.shared_pool = shared_pool;
  config.prior_usage = std::move(prior_usage);
  return config;
}

void bind_cache(py::module_& m) {
  m.def(
      "spread_slots",
      [](int slots, int layers, int experts, const std::vector<std::string>& pins) {
        return spread_slots(slots, layers, experts, pins_of(pins));
      },
      py::arg("num_slots"), py::arg("num_layers"), py::arg("num_experts"),
      py::arg("pins") = std::vector<std::string>());

  py::enum_<ExpertState>(m, "ExpertState")
      .value("ABSENT", ExpertState::kAbsent)
      .value("IN_FLIGHT", ExpertState::kInFlight)
      .value("RESIDENT", ExpertState::kResident);
  py::enum_<AdmitRefusal>(m, "AdmitRefusal")
      .value("NONE", AdmitRefusal::kNone)
      .value("PRESENT", AdmitRefusal::kPresent)
      .value("NO_VICTIM", AdmitRefusal::kNoVictim)
      .value("PRICE", AdmitRefusal::kPrice);

  py::class_<CacheConfig>(m, "CacheConfig", "Shape, slots, policy and price of an expert cache.")
      .def(py::init(&cache_config), py::arg("num_layers"), py::arg("num_experts"), py::arg("top_k"),
           py::arg("slots_per_layer"), py::arg("policy") = "payback", py::arg("upload_price") = 0.67,
           py::arg("shared_pool") = py::none(), py::arg("prior_usage") = std::vector<double>{},
           py::arg("pins") = std::vector<std::string>{})
      .def_readonly("num_layers", &CacheConfig::num_layers)
      .def_readonly("num_experts", &CacheConfig::num_experts)
      .def_readonly("top_k", &CacheConfig::top_k)
      .def_readonly("slots_per_layer", &CacheConfig::slots_per_layer)
      .def_readonly("policy", &CacheConfig::policy)
      .def_readonly("upload_price", &CacheConfig::upload_price);

  py::class_<Admission>(m, "Admission", "A slot taken for an upload, and who left it.")
      .def_readonly("slot", &Admission::slot)
      .def_readonly("evicted", &Admission::evicted)
      .def_readonly("evicted_layer", &Admission::evicted_layer)
      .def_readonly("value", &Admission::value)
      .def_readonly("victim_value", &Admission::victim_value);

  py::class_<ExpertCache>(m, "ExpertCache", "Which experts are in which slots.")
      .def(py::init<CacheConfig>(), py::arg("config"))
      .def_property_readonly("num_slots", &ExpertCache::num_slots)
      .def_property_readonly("last_refusal", &ExpertCache::last_refusal)
      .def(
          "slot_offset",
          [](const ExpertCache& cache, int layer) {
            const std::vector<int>& slots = cache.config().slots_per_layer;
            return std::accumulate(slots.begin(), slots.begin() + layer, 0);
          },
          py::arg("layer"))
      .def("num_held", &ExpertCache::num_held, py::arg("layer"))
      .def("slot_of", &ExpertCache::slot_of, py::arg("layer"), py::arg("expert"))
      .def("state", &ExpertCache::state, py::arg("layer"), py::arg("expert"))
      .def("occupant", &ExpertCache::occupant, py::arg("slot"))
      .def(
          "observe",
          [](ExpertCache& cache, int layer, const Array<int32_t>& ids,
             const std::optional<Array<float>>& weights, bool prefill) {
            const std::span<const float> gate = weights ? view(*weights) : std::span<const float>{};
            const int tokens = static_cast<int>(ids.size() / cache.config().top_k);
            cache.observe(layer, view(ids), gate, tokens, prefill);
          },
          py::arg("layer"), py::arg("ids"), py::arg("weights") = py::none(), py::arg("prefill") = false)
      .def("active",
           [](const ExpertCache& cache, int layer) {
             const auto active = cache.active(layer);
             return std::vector<int>(active.begin(), active.end());
           })
      .def(
          "can_admit",
          [](ExpertCache& cache, int layer, int expert, bool forced) {
            return cache.can_admit(layer, expert, forced);
          },
          py::arg("layer"), py::arg("expert"), py::arg("forced") = false)
      .def(
          "admit",
          [](ExpertCache& cache, int layer, int expert, bool forced) {
            return cache.admit(layer, expert, forced);
          },
          py::arg("layer"), py::arg("expert"), py::arg("forced") = false)
      .def("publish", &ExpertCache::publish, py::arg("slot"))
      .def("cancel", &ExpertCache::cancel, py::arg("slot"))
      .def("preload", &ExpertCache::preload, py::arg("layer"), py::arg("expert"))
      .def("preload_by_usage", [](ExpertCache& cache) { return preload_by_usage(cache); })
      .def("boundary", &ExpertCache::boundary, py::arg("num_new") = 1, py::arg("num_running") = 1)
      .def(
          "value",
          [](ExpertCache& cache, int layer, int expert) { return cache.values(layer).at(size_t(expert)); },
          py::arg("layer"), py::arg("expert"))
      .def("set_future", &ExpertCache::set_future, py::arg("events_per_layer"))
      .def(
          "save", [](const ExpertCache& cache, const std::string& path) { cache.save(path); },
          py::arg("path"))
      .def("load", &ExpertCache::load, py::arg("path"));
}

// The runtime uses the ring with its own event types.
void bind_event_ring(py::module_& m) {
  using Ring = EventRing<int64_t>;
  py::class_<Ring>(m, "IntEventRing", "A bounded lock-free ring of int64 events.")
      .def(py::init<size_t>(), py::arg("capacity"))
      .def("push", &Ring::push, py::arg("event"), py::call_guard<py::gil_scoped_release>())
      .def("drain",
           [](Ring& ring, size_t max_events) {
             std::vector<int64_t> out(max_events);
             out.resize(ring.drain(out));
             return out;
           })
      .def_property_readonly("capacity", &Ring::capacity)
      .def_property_readonly("size", &Ring::size)
      .def_property_readonly("dropped", &Ring::dropped)
      .def("take_dropped", &Ring::take_dropped);
}

}  // namespace

void bind_tested_cache(py::module_& m) {
  bind_timeline(m);
  bind_cache(m);
  bind_event_ring(m);
}
}  // namespace twofold::bindings
