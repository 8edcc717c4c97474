#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device/slot_pool.h"
#include "module.h"
#include "moe/emulated.h"
#include "moe/moe_executor.h"
#include "ops/bind_panels.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using FloatRows = py::array_t<float, py::array::c_style>;
using IntRows = py::array_t<int32_t, py::array::c_style>;

std::string shape_text(const py::array& a) {
  std::string text = "(";
  for (py::ssize_t i = 0; i < a.ndim(); ++i) text += (i ? ", " : "") + std::to_string(a.shape(i));
  return text + ")";
}

void expect_shape(const py::array& a, const char* name, py::ssize_t rows, py::ssize_t columns) {
  if (a.ndim() != 2 || a.shape(0) != rows || a.shape(1) != columns) {
    throw std::invalid_argument(std::string(name) + " has shape " + shape_text(a) + ", expected (" +
                                std::to_string(rows) + ", " + std::to_string(columns) + ")");
  }
}

// A matrix of one expert, in the layer's format and of the right shape.
SourceMatrix expert_matrix(const py::handle& matrix, const std::string& what, int rows, int columns,
                           kernels::WeightFormat format) {
  const SourceMatrix source = source_matrix(matrix, what);
  if (source.rows != rows || source.columns != columns || source.format != format) {
    throw std::invalid_argument(what + " is " + kernels::layout_of(source.format).name + " (" +
                                std::to_string(source.rows) + ", " + std::to_string(source.columns) +
                                "), expected " + kernels::layout_of(format).name + " (" +
                                std::to_string(rows) + ", " + std::to_string(columns) + ")");
  }
  return source;
}

using FormatNames = std::tuple<std::string, std::string, std::string>;

std::vector<FfnFormats> formats_of(const std::vector<FormatNames>& names) {
  std::vector<FfnFormats> formats;
  for (const auto& [gate, up, down] : names)
    formats.push_back({format_named(gate), format_named(up), format_named(down)});
  return formats;
}

std::unique_ptr<ExpertStore> make_store(int num_experts, int hidden, int intermediate,
                                        const std::vector<FormatNames>& names, bool huge_pages,
                                        const std::string& activation, bool biases) {
  const ExpertShape shape{hidden, intermediate, kernels::expert_activation_named(activation), biases};
  return std::make_unique<ExpertStore>(num_experts, shape, formats_of(names), huge_pages);
}

std::unique_ptr<ExpertStore> map_store(int num_experts, int hidden, int intermediate,
                                       const std::vector<FormatNames>& names,
                                       std::shared_ptr<FileMapping> file, size_t offset,
                                       const std::string& activation, bool biases) {
  const std::vector<FfnFormats> formats = formats_of(names);
  const ExpertShape shape{hidden, intermediate, kernels::expert_activation_named(activation), biases};
  const py::gil_scoped_release release;
  return std::make_unique<ExpertStore>(num_experts, shape, formats, std::move(file), offset);
}

void check_experts(const ExpertStore& store, int layer, int first, int count) {
  if (layer < 0 || layer >= store.num_layers() || first < 0 || first + count > store.num_experts()) {
    throw std::invalid_argument("layer " + std::to_string(layer) + ", experts " + std::to_string(first) +
                                " to " + std::to_string(first + count - 1) + " are outside a store of " +
                                std::to_string(store.num_layers()) + " x " +
                                std::to_string(store.num_experts()));
  }
}

void put_experts(ExpertStore& store, const PoolView& pool, int layer, int first,
                 const py::sequence& experts) {
  const int count = static_cast<int>(py::len(experts));
  check_experts(store, layer, first, count);
  const int hidden = store.shape().hidden, intermediate = store.shape().intermediate;
  const FfnFormats& formats = store.layout(layer).formats;
  std::vector<ExpertSource> sources;
  for (int e = 0; e < count; ++e) {
    const py::sequence matrices = experts[size_t(e)];
    if (py::len(matrices) != 3) throw std::invalid_argument("an expert is (gate, up, down)");
    const std::string name = "expert " + std::to_string(first + e) + ": ";
    sources.push_back({expert_matrix(matrices[0], name + "gate", intermediate, hidden, formats.gate),
                       expert_matrix(matrices[1], name + "up", intermediate, hidden, formats.up),
                       expert_matrix(matrices[2], name + "down", hidden, intermediate, formats.down)});
  }
  const py::gil_scoped_release release;
  store.put(pool, layer, first, sources);
}

void put_biases(ExpertStore& store, int layer, int first, const FloatRows& biases) {
  const int count = static_cast<int>(biases.shape(0));
  check_experts(store, layer, first, count);
  expect_shape(biases, "biases", count, py::ssize_t{2} * store.shape().intermediate + store.shape().hidden);
  store.put_biases(layer, first, count, biases.data());
}

void check_layer(const ExpertStore& store, int layer) {
  if (layer < 0 || layer >= store.num_layers())
    throw std::invalid_argument("no layer " + std::to_string(layer));
}

py::tuple layer_formats(const ExpertStore& store, int layer) {
  check_layer(store, layer);
  const FfnFormats& formats = store.layout(layer).formats;
  const auto name = [](kernels::WeightFormat format) { return kernels::layout_of(format).name; };
  return py::make_tuple(name(formats.gate), name(formats.up), name(formats.down));
}

template <typename Event>
py::array_t<Event> drain(EventRing<Event>& ring) {
  std::vector<Event> rows(ring.size());
  rows.resize(ring.drain(rows));
  return py::array_t<Event>(py::ssize_t(rows.size()), rows.data());
}

void bind_store(py::module_& m) {
  m.def("slot_stride", &slot_stride, py::arg("largest_expert_bytes"),
        "From one expert slot on a device to the next, in bytes.");
  py::class_<ExpertStore>(m, "ExpertStore", "All experts of a model in host memory, each packed once.")
      .def(py::init(&make_store), py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"),
           py::arg("formats"), py::arg("huge_pages") = true, py::arg("activation") = "silu",
           py::arg("biases") = false)
      .def_static("from_file", &map_store, py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"),
                  py::arg("formats"), py::arg("file"), py::arg("offset"), py::arg("activation") = "silu",
                  py::arg("biases") = false, "Panels that lie in a file.")
      .def(
          "copied",
          [](const ExpertStore& store, const PoolView& pool) {
            const py::gil_scoped_release release;
            return std::make_unique<ExpertStore>(store, pool);
          },
          py::arg("pool"), "The same in memory of its own.")
      .def(
          "set_kernels",
          [](ExpertStore& store, int layer, const PoolView& pool) {
            check_layer(store, layer);
            store.set_kernels(layer, pool.kernels());
          },
          py::arg("layer"), py::arg("pool"),
          "The CPU computes the layer's experts with the kernels of `pool`.")
      .def("put", &put_experts, py::arg("pool"), py::arg("layer"), py::arg("first"), py::arg("experts"))
      .def("put_biases", &put_biases, py::arg("layer"), py::arg("first"), py::arg("biases").noconvert(),
           "Of experts from `first` on, float32 [experts, 2 intermediate + hidden]: gate's, up's, down's.")
      .def("formats", &layer_formats, py::arg("layer"))
      .def(
          "offset",
          [](const ExpertStore& store, int layer) {
            check_layer(store, layer);
            return store.expert(layer, 0) - store.base();
          },
          py::arg("layer"), "Of the layer's first expert, in bytes from the store's begin.")
      .def(
          "stride",
          [](const ExpertStore& store, int layer) {
            check_layer(store, layer);
            return store.stride(layer);
          },
          py::arg("layer"), "From one expert of the layer to the next, in bytes.")
      .def(
          "panels",
          [](const py::object& self, int layer) {
            const auto& store = self.cast<const ExpertStore&>();
            check_layer(store, layer);
            return read_only_bytes(store.expert(layer, 0), size_t(store.num_experts()) * store.stride(layer),
                                   self);
          },
          py::arg("layer"), "All experts of a layer, as they lie.")
      .def_property_readonly("num_layers", &ExpertStore::num_layers)
      .def_property_readonly("mapped", &ExpertStore::mapped, "Whether they lie in a file's pages.")
      .def_property_readonly("bytes", &ExpertStore::bytes)
      .def_property_readonly("expert_bytes", &ExpertStore::expert_bytes)
      .def_property_readonly("flops_per_token",
                             [](const ExpertStore& s) { return s.shape().flops_per_token(); });
}

void forward(MoeExecutor& executor, int layer, const FloatRows& normed, const IntRows& ids,
             const FloatRows& weights, FloatRows& hidden) {
  if (ids.ndim() != 2)
    throw std::invalid_argument("ids has shape " + shape_text(ids) + ", expected (tokens, top_k)");
  const py::ssize_t num_tokens = ids.shape(0);
  const py::ssize_t width = executor.store().shape().hidden;
  expect_shape(weights, "weights", num_tokens, ids.shape(1));
  expect_shape(normed, "normed", num_tokens, width);
  expect_shape(hidden, "hidden", num_tokens, width);
  const LayerRouting routing{ids.data(), weights.data(), int(num_tokens), int(ids.shape(1))};
  const float* in = normed.data();
  float* out = hidden.mutable_data();
  py::gil_scoped_release release;
  executor.forward(layer, routing, in, out);
}

const LayerPlan& begin_layer(MoeExecutor& executor, int layer, const IntRows& ids, const FloatRows& weights) {
  if (ids.ndim() != 2)
    throw std::invalid_argument("ids has shape " + shape_text(ids) + ", expected (tokens, top_k)");
  expect_shape(weights, "weights", ids.shape(0), ids.shape(1));
  const LayerRouting routing{ids.data(), weights.data(), int(ids.shape(0)), int(ids.shape(1))};
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
  py::class_<LayerPlan>(m, "LayerPlan", "Who computes what of one layer, until the next one begins.")
      .def_readonly("ready", &LayerPlan::ready)
      .def_readonly("awaited", &LayerPlan::awaited)
      .def_readonly("on_cpu", &LayerPlan::on_cpu)
      .def_readonly("joins_deferred", &LayerPlan::joins_deferred)
      .def_readonly("uses_cpu", &LayerPlan::uses_cpu)
      .def_property_readonly("where", [](const LayerPlan& plan) { return array_of<uint8_t>(plan.where); });
}

// [layers, experts]: state (ExpertState), worth; None without slots.
py::object placement_of(const MoeExecutor& executor) {
  const auto* slotted = dynamic_cast<const SlottedAccelerator*>(&executor.accelerator());
  if (slotted == nullptr) return py::none();
  const ExpertCache& cache = slotted->scheduler().cache();
  const int num_layers = cache.config().num_layers, num_experts = cache.config().num_experts;
  py::array_t<uint8_t> states({num_layers, num_experts});
  py::array_t<double> worth({num_layers, num_experts});
  for (int layer = 0; layer < num_layers; ++layer) {
    cache.values(layer, {worth.mutable_data(layer, 0), size_t(num_experts)});
    for (int expert = 0; expert < num_experts; ++expert)
      states.mutable_at(layer, expert) = uint8_t(cache.state(layer, expert));
  }
  return py::make_tuple(states, worth);
}

void predict(MoeExecutor& executor, int layer, const FloatRows& logits) {
  if (logits.ndim() != 2) {
    throw std::invalid_argument("logits has shape " + shape_text(logits) + ", expected (tokens, experts)");
  }
  expect_shape(logits, "logits", logits.shape(0), executor.store().num_experts());
  executor.predict(layer, {logits.data(), size_t(logits.size())}, int(logits.shape(0)));
}

void bind_executor(py::module_& m) {
  // Made by other modules (_cuda), handed to an executor here.
  py::class_<SlottedAccelerator, std::shared_ptr<SlottedAccelerator>>(
      m, "SlottedAccelerator", "Expert slots on a device, and who decides what is in them.");
  py::class_<MoeExecutor>(m, "MoeExecutor", "Runs MoE layers: decides where, computes, records.")
      .def(py::init<const PoolView&, const ExpertStore&, std::optional<CostModel>, int>(), py::arg("pool"),
           py::arg("store"), py::arg("cost") = std::nullopt, py::arg("num_deferred") = 0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_static(
          "emulated",
          [](const PoolView& pool, const ExpertStore& store, const CostModel& cost,
             const LayerSchedulerConfig& config, std::vector<double> dense_bytes,
             std::vector<double> dense_flops, bool preload, double router_bytes, double begin_us,
             const std::tuple<std::vector<double>, std::vector<double>, std::vector<double>>& cpu_dense) {
            auto accelerator = std::make_shared<EmulatedAccelerator>(
                store, cost, config,
                DenseCost{std::move(dense_bytes), std::move(dense_flops), router_bytes,
                          std::get<0>(cpu_dense), std::get<1>(cpu_dense), std::get<2>(cpu_dense)});
            accelerator->begin_at(begin_us);
            return std::make_unique<MoeExecutor>(pool, store, std::move(accelerator), preload);
          },
          py::arg("pool"), py::arg("store"), py::arg("cost"), py::arg("config"), py::arg("dense_bytes"),
          py::arg("dense_flops"), py::arg("preload"), py::arg("router_bytes") = 0.0,
          py::arg("begin_us") = 0.0,
          py::arg("cpu_dense") = std::tuple<std::vector<double>, std::vector<double>, std::vector<double>>(),
          py::keep_alive<0, 1>(), py::keep_alive<0, 2>(),
          "cpu_dense: what the CPU computes of each stretch: bytes, flops of a token, handovers; empty: "
          "nothing.")
      .def_static(
          "on_device",
          [](const PoolView& pool, const ExpertStore& store, std::shared_ptr<SlottedAccelerator> accelerator,
             bool preload) {
            return std::make_unique<MoeExecutor>(pool, store, std::move(accelerator), preload);
          },
          py::arg("pool"), py::arg("store"), py::arg("accelerator"), py::arg("preload") = false,
          py::keep_alive<0, 1>(), py::keep_alive<0, 2>(), py::keep_alive<0, 3>())
      .def(
          "begin_step",
          [](MoeExecutor& executor, int64_t step, std::vector<int64_t> requests,
             std::vector<int32_t> positions, std::vector<uint8_t> generated) {
            if (requests.size() != positions.size()) {
              throw std::invalid_argument("begin_step needs one position per request row");
            }
            executor.begin_step({step, std::move(requests), std::move(positions), std::move(generated)});
          },
          py::arg("step"), py::arg("requests"), py::arg("positions"),
          py::arg("generated") = std::vector<uint8_t>{})
      .def("forward", &forward, py::arg("layer"), py::arg("normed").noconvert(), py::arg("ids").noconvert(),
           py::arg("weights").noconvert(), py::arg("hidden").noconvert())
      .def("begin_layer", &begin_layer, py::arg("layer"), py::arg("ids").noconvert(),
           py::arg("weights").noconvert(), py::return_value_policy::reference_internal)
      .def("compute_cpu", &compute_cpu, py::arg("normed").noconvert(), py::arg("rows").noconvert())
      .def("end_layer", &MoeExecutor::end_layer, py::arg("us"), py::arg("dense_us") = -1.0)
      .def("predict", &predict, py::arg("layer"), py::arg("logits").noconvert())
      .def("save_cache", &MoeExecutor::save_cache, py::arg("path"))
      .def("restore_cache", &MoeExecutor::restore_cache, py::arg("path"))
      .def(
          "place_experts",
          [](MoeExecutor& e, const py::array_t<uint8_t, py::array::c_style | py::array::forcecast>& wanted) {
            const std::span<const uint8_t> cells(wanted.data(), size_t(wanted.size()));
            const py::gil_scoped_release release;
            return e.place_experts(cells);
          },
          py::arg("wanted"), "Between steps: slots hold exactly these, [layers, experts].")
      .def("dynamic_update_counts",
           [](const MoeExecutor& e) {
             const DynamicUpdateCounts c = e.accelerator().dynamic_update_counts();
             return py::dict(py::arg("updated") = c.updated, py::arg("unchanged") = c.unchanged,
                             py::arg("too_short") = c.too_short, py::arg("experts") = c.experts);
           })
      .def("prefetch_counts",
           [](const MoeExecutor& e) {
             const PrefetchCounts c = e.accelerator().prefetch_counts();
             return py::dict(py::arg("predicted") = c.predicted, py::arg("correct") = c.correct,
                             py::arg("misses") = c.misses, py::arg("foreseen") = c.foreseen,
                             py::arg("issued") = c.issued, py::arg("used") = c.used, py::arg("late") = c.late,
                             py::arg("wasted") = c.wasted, py::arg("dropped") = c.dropped);
           })
      .def("end_step", &MoeExecutor::end_step)
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
      .def_property_readonly("num_slots", [](const MoeExecutor& e) { return e.accelerator().num_slots(); })
      .def_property_readonly("device_bytes",
                             [](const MoeExecutor& e) { return e.accelerator().device_bytes(); })
      .def("placement", &placement_of)
      .def("counts",
           [](MoeExecutor& e) {
             const PlacementCounts& c = e.events().counts;
             return py::dict(py::arg("hits") = c.hits, py::arg("cpu_misses") = c.cpu_misses,
                             py::arg("fetched") = c.fetched, py::arg("uploads") = c.uploads,
                             py::arg("evictions") = c.evictions, py::arg("h2d_bytes") = c.h2d_bytes,
                             py::arg("deferred") = c.deferred);
           })
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
  py::enum_<CacheEventKind>(m, "CacheEventKind")
      .value("ADMIT", CacheEventKind::kAdmit)
      .value("EVICT", CacheEventKind::kEvict)
      .value("REJECT", CacheEventKind::kReject)
      .value("PUBLISH", CacheEventKind::kPublish);
  PYBIND11_NUMPY_DTYPE(TokenLayerEvent, step, request, position, layer, num_routed, num_hits, num_cpu,
                       num_fetched, experts, placement, weights, layer_us, cpu_us, gpu_us, predicted_us);
  PYBIND11_NUMPY_DTYPE(UploadEvent, step, request, layer, expert, slot, bytes, queued_us, begin_us, end_us,
                       reason, lane);
  PYBIND11_NUMPY_DTYPE(CacheEvent, step, request, layer, kind, expert, victim, slot, value, victim_value,
                       price, at_us);
  bind_store(m);
  bind_layer_plan(m);
  bind_routing_counts(m);
  bind_executor(m);
}

}  // namespace twofold::bindings
