// The layer scheduler's shared configuration, and the scheduler itself with its prefetcher, as played by the
// simulation in docs/explanation/prefetch.md. Exports only.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <cmath>
#include <type_traits>
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

using Config = LayerSchedulerConfig;

// How an option crosses: as its own type, rules and pins by their names.
template <typename Value>
const Value& crossing(const Value& value) {
  return value;
}
const char* crossing(FetchRule rule) { return name_of(rule); }
// Pins cross only as the default, which is empty.
std::vector<std::string> crossing(const std::vector<LayerPin>&) { return {}; }

template <typename Value>
auto option(const char* name, Value Config::* member, const Value& otherwise) {
  return field(name, member, otherwise);
}
auto option(const char* name, FetchRule Config::* member, FetchRule otherwise) {
  return field_by<const char*>(py::arg(name) = crossing(otherwise),
                               [member](Config& c, const char* rule) { c.*member = fetch_rule_of(rule); });
}
auto option(const char* name, std::vector<LayerPin> Config::* member,
            const std::vector<LayerPin>& otherwise) {
  return field_by<std::vector<std::string>>(
      py::arg(name) = crossing(otherwise),
      [member](Config& c, const std::vector<std::string>& names) { c.*member = pins_of(names); });
}

template <typename Value>
py::object bound(double number) {
  if constexpr (std::is_arithmetic_v<Value>) {
    if (std::isfinite(number)) return py::cast(static_cast<Value>(number));
  }
  return py::none();
}

// Default, smallest and largest number, and help of each option, as arguments of twofold.api.settings.setting.
py::dict scheduler_options() {
  const Config defaults;
  py::dict options;
#define TWOFOLD_OPTION_FACTS(type, name, otherwise, range, help_text)                     \
  options[#name] =                                                                        \
      py::dict(py::arg("default") = crossing(defaults.name), py::arg("help") = help_text, \
               py::arg("low") = bound<type>((range).low), py::arg("high") = bound<type>((range).high));
  TWOFOLD_SCHEDULER_OPTIONS(TWOFOLD_OPTION_FACTS)
#undef TWOFOLD_OPTION_FACTS
  return options;
}

void bind_config(py::module_& m) {
  const Config defaults;
#define TWOFOLD_OPTION_FIELD(type, name, otherwise, range, help) , option(#name, &Config::name, defaults.name)
  def_fields<true>(
      py::class_<Config>(m, "SchedulerConfig",
                         "Shape, slots and options of a layer scheduler; see scheduler_options."),
      field("num_layers", &Config::num_layers), field("num_experts", &Config::num_experts),
      field("top_k", &Config::top_k),
      field_by<std::variant<int, std::vector<int>>>(
          py::arg("slots"), [](Config& c, std::variant<int, std::vector<int>> slots) {
            const int* one = std::get_if<int>(&slots);
            c.slots = one != nullptr ? std::vector<int>{*one} : std::get<std::vector<int>>(std::move(slots));
          }) TWOFOLD_SCHEDULER_OPTIONS(TWOFOLD_OPTION_FIELD));
#undef TWOFOLD_OPTION_FIELD
  m.def("scheduler_options", &scheduler_options);
  m.def("count_meanings", &count_meanings);
}

}  // namespace

void bind_core_scheduler(py::module_& m) {
  bind_config(m);
#define TWOFOLD_PLACEMENT_VALUE(place, name) .value(name, Placement::place)
  py::native_enum<Placement>(m, "Placement", "enum.IntEnum",
                             "Where one routed expert ran: values of `placement` in token_layer events.")
      TWOFOLD_PLACEMENTS(TWOFOLD_PLACEMENT_VALUE)
          .finalize();
#undef TWOFOLD_PLACEMENT_VALUE
  py::native_enum<UploadReason>(m, "UploadReason", "enum.IntEnum",
                                "Why an expert was copied: values of `reason` in upload events.")
      .value("DEMAND", UploadReason::kDemand)
      .value("ADMISSION", UploadReason::kAdmission)
      .value("PREFETCH", UploadReason::kPrefetch)
      .finalize();
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
      .def(
          "advance", [](LayerScheduler& s, double us) { s.devices().advance(us); }, py::arg("us"))
      .def_property_readonly("now_us", [](const LayerScheduler& s) { return s.devices().now_us(); })
      .def("counts", [](const LayerScheduler& s) { return counts_of(s.counts()); });
}

}  // namespace twofold::bindings
