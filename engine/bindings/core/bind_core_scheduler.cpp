// The layer scheduler's shared configuration, and the scheduler itself with its prefetcher, as played by the
// simulation in docs/explanation/prefetch.md. Exports only.
#include <pybind11/stl.h>

#include <variant>

#include "array_view.h"
#include "core/counters.h"
#include "core/layer_pins.h"
#include "fields.h"
#include "module.h"
#include "owning.h"
#include "twofold/layer_scheduler.h"
#include "twofold/timeline.h"

namespace twofold::bindings {
namespace py = pybind11;
namespace {

void bind_config(py::module_& m) {
  using Config = LayerSchedulerConfig;
  const Config defaults;
  def_fields<true>(
      py::class_<Config>(
          m, "SchedulerConfig",
          "Shape, slots, policy and rules of a layer scheduler; those from fetch_rule to prior_usage "
          "are for comparison with other engines and for the lab."),
      field("num_layers", &Config::num_layers), field("num_experts", &Config::num_experts),
      field("top_k", &Config::top_k),
      field_by<std::variant<int, std::vector<int>>>(
          py::arg("slots"),
          [](Config& c, std::variant<int, std::vector<int>> slots) {
            const int* one = std::get_if<int>(&slots);
            c.slots = one != nullptr ? std::vector<int>{*one} : std::get<std::vector<int>>(std::move(slots));
          }),
      field("policy", &Config::policy, defaults.policy),
      field("prefetch", &Config::prefetch, defaults.prefetch),
      field("num_staging", &Config::num_staging, defaults.num_staging),
      field("upload_price", &Config::upload_price, defaults.upload_price),
      field("stream_ahead_from", &Config::stream_ahead_from, defaults.stream_ahead_from),
      field_by<const char*>(py::arg("fetch_rule") = "best-split",
                            [](Config& c, const char* name) { c.fetch_rule = fetch_rule_of(name); }),
      field("background_uploads", &Config::background_uploads, defaults.background_uploads),
      field("always_cache_fetched", &Config::always_cache_fetched, defaults.always_cache_fetched),
      field("shared_pool", &Config::shared_pool, defaults.shared_pool),
      field("prior_usage", &Config::prior_usage, defaults.prior_usage),
      field("fixed_placement", &Config::fixed_placement, defaults.fixed_placement),
      field("replace_from", &Config::replace_from, defaults.replace_from),
      field_by<std::vector<std::string>>(
          py::arg("pins") = std::vector<std::string>(),
          [](Config& c, const std::vector<std::string>& names) { c.pins = pins_of(names); }),
      field("num_deferred", &Config::num_deferred, defaults.num_deferred),
      field("cache_prior", &Config::cache_prior, defaults.cache_prior),
      field("homes", &Config::homes, defaults.homes));
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
  py::class_<Timeline, std::shared_ptr<Timeline>>(
      m, "Timeline", "Virtual clock with a serial link: demand uploads overtake background ones.")
      .def(py::init<double>(), py::arg("upload_us"));
  py::class_<LayerScheduler, std::shared_ptr<LayerScheduler>>(m, "LayerScheduler",
                                                              "Decides and plays layers of decode steps.")
      .def(py::init(
               [](const CostModel& cost, const LayerSchedulerConfig& config, std::shared_ptr<Timeline> link) {
                 Link* const links[] = {link.get()};
                 return owning(std::make_unique<LayerScheduler>(cost, config, links), link);
               }),
           py::arg("cost"), py::arg("config"), py::arg("link"))
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
            s.decide({layer, view(ids), {}, ids.ndim() == 2 ? static_cast<int>(ids.shape(0)) : 0});
          },
          py::arg("layer"), py::arg("ids"))
      .def("advance", &LayerScheduler::advance, py::arg("us"))
      .def_property_readonly("now_us", &LayerScheduler::now_us)
      .def_property_readonly("prefetch_counts",
                             [](const LayerScheduler& s) { return counts_of(s.prefetch_counts()); });
}

}  // namespace twofold::bindings
