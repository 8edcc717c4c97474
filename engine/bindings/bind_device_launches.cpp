// _core.device: launch arguments of a layer's device kernels. The device itself is a separate module
// (device/bind_device.h), which not every machine has.
#include "bind_device_launches.h"

#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>

#include "device/addresses.h"
#include "launch_shapes.h"
#include "step_control.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

kernels::ActivationKind activation_named(const std::string& name) {
  if (name == "f32") return kernels::ActivationKind::kF32;
  if (name == "bf16") return kernels::ActivationKind::kBF16;
  if (name == "q8") return kernels::ActivationKind::kQ8;
  throw std::invalid_argument("activations '" + name + "' given; f32, bf16 or q8 expected");
}

const char* name_of(kernels::ActivationKind kind) {
  return kind == kernels::ActivationKind::kF32    ? "f32"
         : kind == kernels::ActivationKind::kBF16 ? "bf16"
                                                  : "q8";
}

cuda::ExpertLayout make_layout(const std::string& gate_up, const std::string& down, int hidden,
                               int intermediate, const std::string& activation, bool biases) {
  const kernels::WeightFormat first = format_named(gate_up), second = format_named(down);
  if (hidden < 1 || intermediate < 1)
    throw std::invalid_argument("an expert needs at least one row and column");
  const int64_t matrix = kernels::packed_bytes(first, intermediate, hidden);
  const int64_t end = 2 * matrix + kernels::packed_bytes(second, hidden, intermediate);
  return {.gate_up = first,
          .down = second,
          .hidden = hidden,
          .intermediate = intermediate,
          .up_offset = matrix,
          .down_offset = 2 * matrix,
          .bias_offset = biases ? end : 0,
          .activation = kernels::expert_activation_named(activation)};
}

py::array_t<int32_t> tile_groups(const py::array_t<int32_t, py::array::c_style | py::array::forcecast>& begin,
                                 int tile_tokens) {
  if (begin.ndim() != 1 || begin.size() < 1 || tile_tokens < 1)
    throw std::invalid_argument("tile_groups: begin [groups + 1] and tile_tokens >= 1 expected");
  const int groups = int(begin.size()) - 1;
  const int count = cuda::tile_groups(begin.data(), groups, tile_tokens, nullptr);
  py::array_t<int32_t> tiles({py::ssize_t(count), py::ssize_t(2)});
  cuda::tile_groups(begin.data(), groups, tile_tokens, tiles.mutable_data());
  return tiles;
}

void bind_experts(py::module_& m) {
  using cuda::CombinedLayer;
  using cuda::DecodeShape;
  using cuda::EncodedRows;
  using cuda::ExpertBuffers;
  using cuda::ExpertGroups;
  using cuda::ExpertLayout;
  using cuda::PrefillRows;
  using cuda::PrefillTiles;
  py::class_<ExpertLayout>(m, "ExpertLayout",
                           "One expert as panels: gate, up, down, one after the other, then biases.")
      .def(py::init(&make_layout), py::arg("gate_up"), py::arg("down"), py::arg("hidden"),
           py::arg("intermediate"), py::arg("activation") = "silu", py::arg("biases") = false)
      .def_property_readonly(
          "bytes",
          [](const ExpertLayout& layout) {
            return layout.bias_offset != 0
                       ? layout.bias_offset + kernels::expert_bias_bytes(layout.hidden, layout.intermediate)
                       : layout.down_offset +
                             kernels::packed_bytes(layout.down, layout.hidden, layout.intermediate);
          })
      .def_property_readonly(
          "activations",
          [](const ExpertLayout& layout) { return name_of(cuda::activation_of(layout.gate_up)); })
      .def("encoded_bytes", &cuda::encoded_bytes, py::arg("num_tokens"))
      .def("intermediate_bytes", &cuda::intermediate_bytes, py::arg("num_pairs"));
  py::class_<ExpertGroups>(m, "ExpertGroups", "Addresses of a layer's grouping in device memory.")
      .def(py::init([](uint64_t num_groups, uint64_t weights, uint64_t begin, uint64_t pairs, int capacity) {
             return ExpertGroups{pointer<int32_t>(num_groups), pointer<uint64_t>(weights),
                                 pointer<int32_t>(begin), pointer<int32_t>(pairs), capacity};
           }),
           py::kw_only(), py::arg("num_groups"), py::arg("weights"), py::arg("begin"), py::arg("pairs"),
           py::arg("capacity"));
  py::class_<ExpertBuffers>(m, "ExpertBuffers", "Addresses of the experts' buffers in device memory.")
      .def(py::init([](uint64_t encoded, uint64_t intermediate, uint64_t outputs, uint64_t gate_up) {
             return ExpertBuffers{pointer<void>(encoded), pointer<void>(intermediate),
                                  pointer<float>(outputs), pointer<float>(gate_up)};
           }),
           py::kw_only(), py::arg("encoded"), py::arg("intermediate"), py::arg("outputs"),
           py::arg("gate_up") = 0);
  py::class_<EncodedRows>(m, "EncodedRows", "bf16 rows and where their encoded rows go.")
      .def(py::init([](const std::string& kind, uint64_t rows, int num_tokens, int columns, uint64_t out) {
             return EncodedRows{activation_named(kind), pointer<void>(rows), num_tokens, columns,
                                pointer<void>(out)};
           }),
           py::kw_only(), py::arg("kind"), py::arg("rows"), py::arg("num_tokens"), py::arg("columns"),
           py::arg("out"));
  py::class_<DecodeShape>(m, "DecodeShape", "What bounds a decode launch.")
      .def(py::init([](int num_tokens, int top_k, int num_experts, int shared_bytes) {
             return DecodeShape{num_tokens, top_k, num_experts, shared_bytes};
           }),
           py::kw_only(), py::arg("num_tokens"), py::arg("top_k"), py::arg("num_experts"),
           py::arg("shared_bytes"));
  py::class_<PrefillTiles>(m, "PrefillTiles", "The tiles of a prefill launch, in device memory.")
      .def(py::init([](uint64_t tiles, int count, int tokens) {
             return PrefillTiles{pointer<int32_t>(tiles), count, tokens};
           }),
           py::kw_only(), py::arg("tiles"), py::arg("count"), py::arg("tokens"));
  py::class_<PrefillRows>(m, "PrefillRows", "bf16 rows [num_tokens][hidden] of a prefill launch.")
      .def(py::init([](uint64_t x, int num_tokens, int top_k) {
             return PrefillRows{pointer<void>(x), num_tokens, top_k};
           }),
           py::kw_only(), py::arg("x"), py::arg("num_tokens"), py::arg("top_k"));
  py::class_<CombinedLayer>(m, "CombinedLayer",
                            "Both sides' shares of a layer and the hidden states they are added to.")
      .def(py::init([](uint64_t outputs, uint64_t weights, uint64_t where, uint64_t from_cpu, int num_tokens,
                       int top_k, int hidden_size, uint64_t hidden, uint64_t joined_ns) {
             return CombinedLayer{pointer<float>(outputs),
                                  pointer<float>(weights),
                                  pointer<uint8_t>(where),
                                  pointer<float>(from_cpu),
                                  num_tokens,
                                  top_k,
                                  hidden_size,
                                  pointer<float>(hidden),
                                  pointer<int64_t>(joined_ns)};
           }),
           py::kw_only(), py::arg("outputs"), py::arg("weights"), py::arg("where"), py::arg("from_cpu"),
           py::arg("num_tokens"), py::arg("top_k"), py::arg("hidden_size"), py::arg("hidden"),
           py::arg("joined_ns") = 0);
  m.def("tile_groups", &tile_groups, py::arg("begin"), py::arg("tile_tokens"),
        "int32 [tiles, 2] of group and first pair within it.");
  m.def("tile_tokens_for", &cuda::tile_tokens_for, py::arg("num_pairs"), py::arg("num_groups"));
}

void bind_placing(py::module_& m) {
  using cuda::MailboxShape;
  using cuda::PlacedLayer;
  using cuda::PlacementTables;
  using cuda::RoutedLayer;
  py::class_<RoutedLayer>(m, "RoutedLayer", "A layer's routing in device memory.")
      .def(py::init([](uint64_t ids, uint64_t weights, uint64_t normed, int num_tokens, int layer,
                       uint64_t ahead) {
             return RoutedLayer{
                 pointer<int32_t>(ids), pointer<float>(weights), pointer<void>(normed), num_tokens, layer,
                 pointer<float>(ahead)};
           }),
           py::kw_only(), py::arg("ids"), py::arg("weights"), py::arg("normed"), py::arg("num_tokens"),
           py::arg("layer"), py::arg("ahead") = 0);
  py::class_<PlacementTables>(m, "PlacementTables", "What the device reads to place a layer's experts.")
      .def(py::init([](uint64_t slots, uint64_t split, uint64_t slot_base, int64_t slot_stride,
                       uint64_t store_base, int64_t store_stride, int num_experts, uint64_t prices) {
             return PlacementTables{pointer<int32_t>(slots),
                                    pointer<uint8_t>(split),
                                    slot_base,
                                    slot_stride,
                                    store_base,
                                    store_stride,
                                    num_experts,
                                    pointer<cuda::ReadPrices>(prices)};
           }),
           py::kw_only(), py::arg("slots"), py::arg("split"), py::arg("slot_base"), py::arg("slot_stride"),
           py::arg("store_base"), py::arg("store_stride"), py::arg("num_experts"), py::arg("prices") = 0);
  py::class_<PlacedLayer>(m, "PlacedLayer", "What a layer's routing becomes, in device memory.")
      .def(py::init([](const cuda::ExpertGroups& groups, uint64_t where, uint64_t num_on_cpu) {
             return PlacedLayer{groups, pointer<uint8_t>(where), pointer<uint32_t>(num_on_cpu)};
           }),
           py::kw_only(), py::arg("groups"), py::arg("where"), py::arg("num_on_cpu"));
  py::class_<MailboxShape>(m, "MailboxShape", "What a mailbox has room for.")
      .def(py::init([](int num_layers, int max_tokens, int top_k, int hidden, int num_ahead) {
             return MailboxShape{num_layers, max_tokens, top_k, hidden, num_ahead};
           }),
           py::kw_only(), py::arg("num_layers"), py::arg("max_tokens"), py::arg("top_k"), py::arg("hidden"),
           py::arg("num_ahead") = 0);
}

}  // namespace

void bind_device_launches(py::module_& parent) {
  py::module_ m = parent.def_submodule("device", "What a device's kernels are told of a layer.");
  bind_experts(m);
  bind_placing(m);
}

}  // namespace twofold::bindings
