// MoE executor: what it is made of, its plans of layers, its events.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "addresses.h"
#include "core/counters.h"
#include "device/device_accelerator.h"
#include "fields.h"
#include "module.h"
#include "moe/emulated.h"
#include "moe/moe_executor.h"
#include "moe/rows.h"
#include "owning.h"
#include "pool_view.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

template <typename Event>
py::array_t<Event> drain(EventRing<Event>& ring) {
  std::vector<Event> rows(ring.size());
  rows.resize(ring.drain(rows));
  return py::array_t<Event>(py::ssize_t(rows.size()), rows.data());
}

// By kind, the dtype of its arrays and the meaning of each field.
py::dict event_formats() {
#define TWOFOLD_DESCRIBE(type, name, extent, meaning) PYBIND11_FIELD_DESCRIPTOR(Event, name),
#define TWOFOLD_EXPLAIN(type, name, extent, meaning) explained[#name] = meaning;
#define TWOFOLD_EXPORT(kind, Struct, FIELDS)                                              \
  {                                                                                       \
    using Event = Struct;                                                                 \
    py::detail::npy_format_descriptor<Event>::register_dtype({FIELDS(TWOFOLD_DESCRIBE)}); \
    py::dict explained;                                                                   \
    FIELDS(TWOFOLD_EXPLAIN)                                                               \
    formats[kind] = py::make_tuple(py::dtype::of<Event>(), explained);                    \
  }
  py::dict formats;
  TWOFOLD_EXPORT("token_layer", TokenLayerEvent, TWOFOLD_TOKEN_LAYER_FIELDS)
  TWOFOLD_EXPORT("upload", UploadEvent, TWOFOLD_UPLOAD_FIELDS)
  TWOFOLD_EXPORT("cache_event", CacheEvent, TWOFOLD_CACHE_EVENT_FIELDS)
  return formats;
}

// ids and weights [tokens, top_k].
LayerRouting routing_of(const IntRows& ids, const FloatRows& weights) {
  if (ids.ndim() != 2)
    throw std::invalid_argument("ids has shape " + shape_text(ids) + ", expected (tokens, top_k)");
  expect_shape(weights, "weights", ids.shape(0), ids.shape(1));
  return {ids.data(), weights.data(), int(ids.shape(0)), int(ids.shape(1))};
}

void forward(MoeExecutor& executor, int layer, const FloatRows& normed, const IntRows& ids,
             const FloatRows& weights, FloatRows& hidden) {
  const LayerRouting routing = routing_of(ids, weights);
  const py::ssize_t width = executor.store().shape().hidden;
  expect_shape(normed, "normed", ids.shape(0), width);
  expect_shape(hidden, "hidden", ids.shape(0), width);
  const float* in = normed.data();
  float* out = hidden.mutable_data();
  const py::gil_scoped_release release;
  executor.forward(layer, routing, in, out);
}

const LayerPlan& begin_layer(MoeExecutor& executor, int layer, const IntRows& ids, const FloatRows& weights) {
  const LayerRouting routing = routing_of(ids, weights);
  const py::gil_scoped_release release;
  return executor.begin_layer(layer, routing);
}

void compute_cpu(MoeExecutor& executor, const FloatRows& normed, FloatRows& rows) {
  const py::ssize_t width = executor.store().shape().hidden;
  expect_shape(normed, "normed", executor.num_rows(), width);
  expect_shape(rows, "rows", executor.num_rows(), width);
  const float* in = normed.data();
  float* out = rows.mutable_data();
  const py::gil_scoped_release release;
  executor.compute_cpu(in, out);
}

template <typename To, typename From>
py::array_t<To> array_of(const std::vector<From>& values) {
  static_assert(sizeof(To) == sizeof(From));
  return py::array_t<To>(py::ssize_t(values.size()), reinterpret_cast<const To*>(values.data()));
}

void bind_layer_plan(py::module_& m) {
  py::class_<PlacedGroups>(m, "PlacedGroups", "Experts of a layer: copies of their tokens' pairs, grouped.")
      .def_property_readonly("experts",
                             [](const PlacedGroups& p) { return array_of<int32_t>(p.groups.experts); })
      .def_property_readonly("begin", [](const PlacedGroups& p) { return array_of<int32_t>(p.groups.begin); })
      .def_property_readonly("pairs", [](const PlacedGroups& p) { return array_of<int32_t>(p.groups.pairs); })
      .def_property_readonly("addresses", [](const PlacedGroups& p) { return array_of<int64_t>(p.weights); })
      .def("__len__", [](const PlacedGroups& p) { return p.groups.size(); });
  py::class_<LayerPlan>(
      m, "LayerPlan",
      "Which device, or the CPU, computes each expert of a layer; valid until the next layer.")
      .def(
          "ready",
          [](const LayerPlan& plan, size_t device) -> const PlacedGroups& {
            return plan.devices.at(device).ready;
          },
          py::arg("device") = 0, py::return_value_policy::reference_internal)
      .def(
          "awaited",
          [](const LayerPlan& plan, size_t device) -> const PlacedGroups& {
            return plan.devices.at(device).awaited;
          },
          py::arg("device") = 0, py::return_value_policy::reference_internal)
      .def_readonly("on_cpu", &LayerPlan::on_cpu)
      .def_readonly("joins_deferred", &LayerPlan::joins_deferred)
      .def_readonly("uses_cpu", &LayerPlan::uses_cpu)
      .def_property_readonly("where", [](const LayerPlan& plan) { return array_of<uint8_t>(plan.where); });
}

// [layers, experts]: state (ExpertState), worth; None without slots.
py::object placement_of(const MoeExecutor& executor) {
  const auto* slotted = dynamic_cast<const SlottedAccelerator*>(&executor.accelerator());
  if (slotted == nullptr) return py::none();
  const ExpertCache& cache = slotted->scheduler().devices().cache(0);
  const int num_layers = cache.config().num_layers, num_experts = cache.config().num_experts;
  py::array_t<uint8_t> states({num_layers, num_experts});
  py::array_t<double> worth({num_layers, num_experts});
  for (int layer = 0; layer < num_layers; ++layer) {
    cache.values(layer, {worth.mutable_data(layer, 0), size_t(num_experts)});
    for (int expert = 0; expert < num_experts; ++expert) {
      uint8_t& state = states.mutable_at(layer, expert);
      state = 0;
      for (int d = 0; d < slotted->scheduler().devices().count(); ++d)
        state = std::max(state, uint8_t(slotted->scheduler().devices().cache(d).state(layer, expert)));
    }
  }
  return py::make_tuple(states, worth);
}

// [layers, experts]: the device that holds the expert, the first of several; -1 if none does.
py::object devices_of(const MoeExecutor& executor) {
  const auto* slotted = dynamic_cast<const SlottedAccelerator*>(&executor.accelerator());
  if (slotted == nullptr) return py::none();
  const LayerScheduler& scheduler = slotted->scheduler();
  const CacheConfig& shape = scheduler.devices().cache(0).config();
  py::array_t<int8_t> devices({shape.num_layers, shape.num_experts});
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int expert = 0; expert < shape.num_experts; ++expert) {
      int device = scheduler.devices().count() - 1;
      while (device >= 0 && !scheduler.devices().cache(device).is_resident(layer, expert)) --device;
      devices.mutable_at(layer, expert) = int8_t(device);
    }
  }
  return devices;
}

void predict(MoeExecutor& executor, int layer, const FloatRows& logits) {
  if (logits.ndim() != 2) {
    throw std::invalid_argument("logits has shape " + shape_text(logits) + ", expected (tokens, experts)");
  }
  expect_shape(logits, "logits", logits.shape(0), executor.store().num_experts());
  executor.predict(layer, {logits.data(), size_t(logits.size())}, int(logits.shape(0)));
}

// Addresses are the device's.
uint64_t address(const std::byte* memory) { return reinterpret_cast<uint64_t>(memory); }

// Made by device modules (_cuda), which share these classes; handed to an executor here.
void bind_accelerators(py::module_& m) {
  using Device = DeviceAccelerator;
  py::class_<SlottedAccelerator, std::shared_ptr<SlottedAccelerator>>(
      m, "SlottedAccelerator", "Expert slots, and who decides what is in them.");
  py::class_<Device, SlottedAccelerator, std::shared_ptr<Device>>(
      m, "DeviceAccelerator", "Expert slots on a device, with uploads in real time.")
      .def_property_readonly("warning", &Device::warning)
      .def_property_readonly("slot_base", [](const Device& a) { return address(a.slots().slot(0)); })
      .def_property_readonly("slot_stride", [](const Device& a) { return a.slots().stride(); })
      .def_property_readonly("slot_table", [](const Device& a) { return address(a.tables().device()); })
      .def_property_readonly("store_base", [](const Device& a) { return address(a.store_on_device()); })
      .def("split_table", &Device::split_table)
      .def("read_prices", &Device::read_prices)
      .def(
          "before_compute", [](Device& a, Address stream, int device) { a.before_compute({stream}, device); },
          py::arg("stream"), py::arg("device") = 0, py::call_guard<py::gil_scoped_release>())
      .def(
          "after_compute", [](Device& a, Address stream, int device) { a.after_compute({stream}, device); },
          py::arg("stream"), py::arg("device") = 0, py::call_guard<py::gil_scoped_release>());
}

void bind_executor(py::module_& m) {
  def_fields(
      py::class_<DenseCost>(m, "DenseCost", "Work beside the routed experts, by stretch between MoE layers."),
      field("bytes", &DenseCost::bytes), field("flops_per_token", &DenseCost::flops_per_token),
      field("router_bytes", &DenseCost::router_bytes, 0.0), field("cpu_bytes", &DenseCost::cpu_bytes, {}),
      field("cpu_flops_per_token", &DenseCost::cpu_flops_per_token, {}),
      field("handovers", &DenseCost::handovers, {}));
  using Executor = std::shared_ptr<MoeExecutor>;
  using Store = std::shared_ptr<ExpertStore>;
  py::class_<MoeExecutor, Executor>(m, "MoeExecutor", "Runs MoE layers: decides where, computes, records.")
      .def(py::init([](const PoolView& pool, Store store, std::optional<CostModel> cost, int num_deferred) {
             return owning(std::make_unique<MoeExecutor>(pool, *store, std::move(cost), num_deferred), pool,
                           store);
           }),
           py::arg("pool"), py::arg("store"), py::arg("cost") = std::nullopt, py::arg("num_deferred") = 0)
      .def_static(
          "emulated",
          [](const PoolView& pool, Store store, const CostModel& cost, const LayerSchedulerConfig& config,
             DenseCost dense, bool preload, double begin_us, int64_t first_step) {
            auto accelerator = std::make_shared<EmulatedAccelerator>(*store, cost, config, std::move(dense));
            accelerator->begin_at(begin_us);
            return owning(
                std::make_unique<MoeExecutor>(pool, *store, std::move(accelerator), preload, first_step),
                pool, store);
          },
          py::arg("pool"), py::arg("store"), py::arg("cost"), py::arg("config"), py::arg("dense"),
          py::kw_only(), py::arg("preload"), py::arg("begin_us") = 0.0, py::arg("first_step") = -1)
      .def_static(
          "on_device",
          [](const PoolView& pool, Store store, std::shared_ptr<SlottedAccelerator> accelerator, bool preload,
             int64_t first_step) {
            return owning(
                std::make_unique<MoeExecutor>(pool, *store, std::move(accelerator), preload, first_step),
                pool, store);
          },
          py::arg("pool"), py::arg("store"), py::arg("accelerator"), py::arg("preload") = false,
          py::arg("first_step") = -1)
      .def(
          "begin_step",
          [](MoeExecutor& executor, int64_t step, std::vector<int64_t> requests,
             std::vector<int32_t> positions, std::vector<uint8_t> generated, std::vector<uint8_t> verified,
             bool is_recorded, std::vector<uint8_t> pictures) {
            if (requests.size() != positions.size()) {
              throw std::invalid_argument("begin_step needs one position per request row");
            }
            if (!verified.empty() && verified.size() != requests.size()) {
              throw std::invalid_argument(std::to_string(verified.size()) +
                                          " rows are said to be verified or not, " +
                                          std::to_string(requests.size()) + " rows were expected");
            }
            executor.begin_step({step, std::move(requests), std::move(positions), std::move(generated),
                                 std::move(verified), is_recorded, std::move(pictures)});
          },
          py::arg("step"), py::arg("requests"), py::arg("positions"),
          py::arg("generated") = std::vector<uint8_t>{}, py::arg("verified") = std::vector<uint8_t>{},
          py::arg("is_recorded") = true, py::arg("pictures") = std::vector<uint8_t>{})
      .def("forward", &forward, py::arg("layer"), py::arg("normed").noconvert(), py::arg("ids").noconvert(),
           py::arg("weights").noconvert(), py::arg("hidden").noconvert())
      .def("begin_layer", &begin_layer, py::arg("layer"), py::arg("ids").noconvert(),
           py::arg("weights").noconvert(), py::return_value_policy::reference_internal)
      .def("compute_cpu", &compute_cpu, py::arg("normed").noconvert(), py::arg("rows").noconvert())
      .def("end_layer", &MoeExecutor::end_layer, py::arg("us"), py::arg("dense_us") = -1.0)
      .def_property_readonly("needs_look_ahead", &MoeExecutor::needs_look_ahead,
                             "Whether predictions for later layers are used in this step.")
      .def("predict", &predict, py::arg("layer"), py::arg("logits").noconvert())
      .def("save_cache", &MoeExecutor::save_cache, py::arg("path"))
      .def("record_release", &MoeExecutor::record_release)
      .def("restore_cache", &MoeExecutor::restore_cache, py::arg("path"))
      .def(
          "place_experts",
          [](MoeExecutor& e, const py::array_t<uint8_t, py::array::c_style | py::array::forcecast>& wanted) {
            const std::span<const uint8_t> cells(wanted.data(), size_t(wanted.size()));
            const py::gil_scoped_release release;
            return e.place_experts(cells);
          },
          py::arg("wanted"), "Between steps: slots hold exactly these, [layers, experts].")
      .def("counts", [](MoeExecutor& e) { return counts_of(e.events().counts); })
      .def("scheduler_counts",
           [](const MoeExecutor& e) { return counts_of(e.accelerator().scheduler_counts()); })
      .def("end_step", &MoeExecutor::end_step, py::arg("with_head") = true)
      .def("idle", &MoeExecutor::idle)
      .def_property(
          "events_enabled", [](MoeExecutor& e) { return e.events().enabled; },
          [](MoeExecutor& e, bool on) { e.events().enabled = on; })
      .def_property_readonly("routing_counts", &MoeExecutor::routing_counts)
      .def_property_readonly("virtual_now_us",
                             [](const MoeExecutor& e) -> std::optional<double> {
                               const double now = e.accelerator().virtual_now_us();
                               return now < 0 ? std::nullopt : std::optional<double>(now);
                             })
      .def("clock_parts",
           [](const MoeExecutor& e) {
             const ClockParts p = e.clock_parts();
             return py::make_tuple(p.dense_us, p.experts_gpu_us, p.experts_cpu_us, p.link_us, p.head_us);
           })
      .def_property_readonly("num_expert_runs", [](MoeExecutor& e) { return e.events().num_expert_runs; })
      .def_property_readonly("num_slots", [](const MoeExecutor& e) { return e.accelerator().num_slots(); })
      .def_property_readonly("device_bytes",
                             [](const MoeExecutor& e) { return e.accelerator().device_bytes(); })
      .def("placement", &placement_of)
      .def("placement_devices", &devices_of,
           "[layers, experts]: holding device, -1: none; None without slots.")
      .def("drain_events",
           [](MoeExecutor& e) {
             return py::dict(py::arg("token_layer") = drain(e.events().token_layers),
                             py::arg("upload") = drain(e.events().uploads),
                             py::arg("cache_event") = drain(e.events().cache_events));
           })
      .def("take_dropped", [](MoeExecutor& e) {
        return py::dict(py::arg("token_layer") = e.events().token_layers.take_dropped(),
                        py::arg("upload") = e.events().uploads.take_dropped(),
                        py::arg("cache_event") = e.events().cache_events.take_dropped());
      });
}

}  // namespace

void bind_runtime(py::module_& m) {
  py::native_enum<CacheEventKind>(m, "CacheEventKind", "enum.IntEnum",
                                  "What the expert cache decided: values of `kind` in cache_event events.")
      .value("ADMIT", CacheEventKind::kAdmit)
      .value("EVICT", CacheEventKind::kEvict)
      .value("REJECT", CacheEventKind::kReject)
      .value("PUBLISH", CacheEventKind::kPublish)
      .finalize();
  m.def("event_formats", [formats = event_formats()] { return formats; });
  bind_store(m);
  bind_rank_worker(m);
  bind_training(m);
  bind_layer_plan(m);
  bind_routing_counts(m);
  bind_accelerators(m);
  bind_executor(m);
}

}  // namespace twofold::bindings
