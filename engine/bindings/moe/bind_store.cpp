// The expert store: all experts of a model in host memory.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "device/slot_pool.h"
#include "module.h"
#include "moe/expert_store.h"
#include "moe/rows.h"
#include "ops/bind_panels.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

// A matrix of one expert, in its format and of the right shape.
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
// Formats of a layer's experts: one for all, or one each.
using LayerNames = std::variant<FormatNames, std::vector<FormatNames>>;

// limits: one per layer, or none.
std::vector<LayerFormats> formats_of(const std::vector<LayerNames>& names, const std::vector<float>& limits) {
  if (!limits.empty() && limits.size() != names.size()) {
    throw std::invalid_argument("limits of " + std::to_string(limits.size()) +
                                " layers were given; expected " + std::to_string(names.size()) + " or none");
  }
  std::vector<LayerFormats> formats(names.size());
  for (size_t layer = 0; layer < names.size(); ++layer) {
    const auto add = [&](const FormatNames& of_expert) {
      const auto& [gate, up, down] = of_expert;
      formats[layer].push_back(
          {format_named(gate), format_named(up), format_named(down), limits.empty() ? 0 : limits[layer]});
    };
    if (const auto* of_all = std::get_if<FormatNames>(&names[layer])) {
      add(*of_all);
    } else {
      for (const FormatNames& each : std::get<std::vector<FormatNames>>(names[layer])) add(each);
    }
  }
  return formats;
}

std::shared_ptr<ExpertStore> make_store(int num_experts, int hidden, int intermediate,
                                        const std::vector<LayerNames>& names, bool huge_pages,
                                        const std::string& activation, bool biases,
                                        const std::vector<float>& limits, std::shared_ptr<Ranks> ranks,
                                        std::vector<uint64_t> holders, int second_half) {
  const ExpertShape shape{hidden, intermediate, kernels::expert_activation_named(activation), biases,
                          second_half};
  return std::make_shared<ExpertStore>(num_experts, shape, formats_of(names, limits), huge_pages,
                                       ExpertSpread{std::move(ranks), std::move(holders)});
}

std::shared_ptr<ExpertStore> map_store(int num_experts, int hidden, int intermediate,
                                       const std::vector<LayerNames>& names,
                                       std::shared_ptr<FileMapping> file, size_t offset,
                                       const std::string& activation, bool biases,
                                       const std::vector<float>& limits, int second_half) {
  const std::vector<LayerFormats> formats = formats_of(names, limits);
  const ExpertShape shape{hidden, intermediate, kernels::expert_activation_named(activation), biases,
                          second_half};
  const py::gil_scoped_release release;
  return std::make_shared<ExpertStore>(num_experts, shape, formats, std::move(file), offset);
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
  const int hidden = store.shape().hidden;
  std::vector<ExpertSource> sources;
  for (int e = 0; e < count; ++e) {
    const py::sequence matrices = experts[size_t(e)];
    if (py::len(matrices) != 3) throw std::invalid_argument("an expert is (gate, up, down)");
    const FfnFormats& formats = store.layout(layer, first + e).formats;
    const int intermediate = store.layout(layer, first + e).intermediate;
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

void put_adapter(ExpertStore& store, const std::shared_ptr<AdapterRows>& rows, int adapter,
                 const std::tuple<int, int, int>& place, const std::shared_ptr<LowRank>& part) {
  const auto [layer, expert, matrix] = place;
  store.adapted.put(store, rows, {layer, expert, matrix}, adapter, part);
}

void check_layer(const ExpertStore& store, int layer) {
  if (layer < 0 || layer >= store.num_layers())
    throw std::invalid_argument("no layer " + std::to_string(layer));
}

LayerNames layer_formats(const ExpertStore& store, int layer) {
  check_layer(store, layer);
  const auto name = [](kernels::WeightFormat format) { return kernels::layout_of(format).name; };
  std::vector<FormatNames> names;
  bool is_uniform = true;
  for (int expert = 0; expert < store.num_experts(); ++expert) {
    const FfnFormats& formats = store.layout(layer, expert).formats;
    names.emplace_back(name(formats.gate), name(formats.up), name(formats.down));
    is_uniform = is_uniform && names.back() == names.front();
  }
  if (is_uniform) return names.front();
  return names;
}

// -1: another process holds the expert.
py::array_t<int64_t> layer_offsets(const ExpertStore& store, int layer) {
  check_layer(store, layer);
  py::array_t<int64_t> offsets(store.num_experts());
  for (int expert = 0; expert < store.num_experts(); ++expert) {
    const std::byte* const at = store.expert(layer, expert);
    offsets.mutable_at(expert) = at == nullptr ? -1 : at - store.base();
  }
  return offsets;
}

}  // namespace

void bind_store(py::module_& m) {
  m.def("slot_stride", &slot_stride, py::arg("largest_expert_bytes"),
        "From one expert slot on a device to the next, in bytes.");
  py::class_<ExpertStore, std::shared_ptr<ExpertStore>>(
      m, "ExpertStore", "All experts of a model in host memory, each packed once.")
      .def(py::init(&make_store), py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"),
           py::arg("formats"), py::arg("huge_pages") = true, py::arg("activation") = "silu",
           py::arg("biases") = false, py::arg("limits") = std::vector<float>(), py::arg("ranks") = py::none(),
           py::arg("holders") = std::vector<uint64_t>(), py::arg("second_half") = 0)
      .def_static("from_file", &map_store, py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"),
                  py::arg("formats"), py::arg("file"), py::arg("offset"), py::arg("activation") = "silu",
                  py::arg("biases") = false, py::arg("limits") = std::vector<float>(),
                  py::arg("second_half") = 0, "Panels that lie in a file.")
      .def(
          "copied",
          [](const ExpertStore& store, const PoolView& pool) {
            const py::gil_scoped_release release;
            return std::make_shared<ExpertStore>(store, pool);
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
           "Biases of experts from `first` on, float32 [experts, 2 intermediate + hidden]: gate's, up's, "
           "down's.")
      .def("put_adapter", &put_adapter, py::arg("rows"), py::arg("adapter"), py::arg("place"),
           py::arg("part"),
           "As PackedMatrix.put_adapter, for the matrix (layer, expert, 0 gate, 1 up or 2 down).")
      .def(
          "drop_adapter", [](ExpertStore& store, int adapter) { store.adapted.drop(store, adapter); },
          py::arg("adapter"))
      .def("formats", &layer_formats, py::arg("layer"),
           "(gate, up, down) of a layer's experts, or a list of one for each if they differ.")
      .def("offsets", &layer_offsets, py::arg("layer"),
           "Of each expert of the layer, in bytes from the store's begin; -1: this process does not hold it.")
      .def(
          "panels",
          [](const py::object& self, int layer) {
            const auto& store = self.cast<const ExpertStore&>();
            check_layer(store, layer);
            const auto panels = store.panels(layer);
            return read_only_bytes(panels.data(), panels.size(), self);
          },
          py::arg("layer"), "A layer's experts that this process holds, as they lie.")
      .def(
          "holds",
          [](const ExpertStore& store, int layer, int expert) {
            check_experts(store, layer, expert, 1);
            return store.expert(layer, expert) != nullptr;
          },
          py::arg("layer"), py::arg("expert"), "Whether this process holds the expert.")
      .def_property_readonly("num_layers", &ExpertStore::num_layers)
      .def_property_readonly("mapped", &ExpertStore::mapped, "Whether they lie in a file's pages.")
      .def_property_readonly("bytes", &ExpertStore::bytes)
      .def_property_readonly("expert_bytes", &ExpertStore::expert_bytes)
      .def_property_readonly("mean_expert_bytes", &ExpertStore::mean_expert_bytes)
      .def_property_readonly("flops_per_token",
                             [](const ExpertStore& s) { return s.shape().flops_per_token(); });
}

}  // namespace twofold::bindings
