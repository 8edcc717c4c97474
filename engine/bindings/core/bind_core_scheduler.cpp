// The layer scheduler's shared configuration, and the scheduler itself with its prefetcher, as played by the
// simulation in docs/explanation/prefetch.md. Exports only.
#include <pybind11/stl.h>

#include "array_view.h"
#include "core/layer_pins.h"
#include "module.h"
#include "twofold/layer_scheduler.h"
#include "twofold/timeline.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

void bind_config(py::module_& m) {
  const LayerSchedulerConfig defaults;
  py::class_<LayerSchedulerConfig>(m, "SchedulerConfig",
                                   "Shape, slots, policy and rules of a layer scheduler; those from "
                                   "fetch_rule to prior_usage are for comparison with other "
                                   "engines and for the lab.")
      .def(py::init([](int num_layers, int num_experts, int top_k, int num_slots, std::string policy,
                       bool prefetch, int num_staging, double upload_price, int stream_ahead_from,
                       const std::string& fetch_rule, bool background_uploads, bool always_cache_fetched,
                       std::optional<bool> shared_pool, std::vector<double> prior_usage, bool fixed_placement,
                       int replace_from, const std::vector<std::string>& pins, int num_deferred,
                       double cache_prior) {
             return LayerSchedulerConfig{.num_layers = num_layers,
                                         .num_experts = num_experts,
                                         .top_k = top_k,
                                         .num_slots = num_slots,
                                         .policy = std::move(policy),
                                         .num_staging = num_staging,
                                         .upload_price = upload_price,
                                         .stream_ahead_from = stream_ahead_from,
                                         .fetch_rule = fetch_rule_of(fetch_rule),
                                         .background_uploads = background_uploads,
                                         .always_cache_fetched = always_cache_fetched,
                                         .shared_pool = shared_pool,
                                         .prefetch = prefetch,
                                         .fixed_placement = fixed_placement,
                                         .replace_from = replace_from,
                                         .num_deferred = num_deferred,
                                         .cache_prior = cache_prior,
                                         .prior_usage = std::move(prior_usage),
                                         .pins = pins_of(pins)};
           }),
           py::arg("num_layers"), py::arg("num_experts"), py::arg("top_k"), py::arg("num_slots"),
           py::arg("policy") = defaults.policy, py::arg("prefetch") = defaults.prefetch,
           py::arg("num_staging") = defaults.num_staging, py::arg("upload_price") = defaults.upload_price,
           py::arg("stream_ahead_from") = defaults.stream_ahead_from, py::kw_only(),
           py::arg("fetch_rule") = "best-split", py::arg("background_uploads") = defaults.background_uploads,
           py::arg("always_cache_fetched") = defaults.always_cache_fetched,
           py::arg("shared_pool") = defaults.shared_pool, py::arg("prior_usage") = defaults.prior_usage,
           py::arg("fixed_placement") = defaults.fixed_placement,
           py::arg("replace_from") = defaults.replace_from, py::arg("pins") = std::vector<std::string>(),
           py::arg("num_deferred") = defaults.num_deferred, py::arg("cache_prior") = defaults.cache_prior);
}

}  // namespace

void bind_core_scheduler(py::module_& m) {
  bind_config(m);
  py::enum_<Placement>(m, "Placement")
      .value("HIT", Placement::kHit)
      .value("CPU", Placement::kCpu)
      .value("FETCHED", Placement::kFetched);
  py::enum_<UploadReason>(m, "UploadReason")
      .value("DEMAND", UploadReason::kDemand)
      .value("ADMISSION", UploadReason::kAdmission)
      .value("PREFETCH", UploadReason::kPrefetch);
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
  py::class_<Timeline>(m, "Timeline",
                       "Virtual clock with a serial link: demand uploads overtake background ones.")
      .def(py::init<double>(), py::arg("upload_us"));
  py::class_<LayerScheduler>(m, "LayerScheduler", "Decides and plays layers of decode steps.")
      .def(py::init([](const CostModel& cost, const LayerSchedulerConfig& config, Timeline& link) {
             return std::make_unique<LayerScheduler>(cost, config, link);
           }),
           py::arg("cost"), py::arg("config"), py::arg("link"), py::keep_alive<1, 4>())
      .def("begin_step", [](LayerScheduler& s) { s.begin_step(); })
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
