// _core.device: launch arguments of a layer's device kernels. The device itself is a separate module
// (device/bind_device.h), which not every machine has.
#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>

#include "fields.h"
#include "launch_shapes.h"
#include "launches/bind_launches.h"
#include "low_rank_layer.h"
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
                               int intermediate, const std::string& activation, bool biases, float limit) {
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
          .activation = kernels::expert_activation_named(activation),
          .limit = limit};
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
           py::arg("intermediate"), py::arg("activation") = "silu", py::arg("biases") = false,
           py::arg("limit") = 0.0f)
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
  def_fields(py::class_<ExpertGroups>(m, "ExpertGroups", "Addresses of a layer's grouping in device memory."),
             field("num_groups", &ExpertGroups::num_groups), field("weights", &ExpertGroups::weights),
             field("begin", &ExpertGroups::begin), field("pairs", &ExpertGroups::pairs),
             field("capacity", &ExpertGroups::capacity));
  def_fields(
      py::class_<ExpertBuffers>(m, "ExpertBuffers", "Addresses of the experts' buffers in device memory."),
      field("encoded", &ExpertBuffers::encoded), field("intermediate", &ExpertBuffers::intermediate),
      field("outputs", &ExpertBuffers::outputs), field("gate_up", &ExpertBuffers::gate_up, Address{}),
      field("adapted", &ExpertBuffers::adapted, Address{}));
  def_fields(
      py::class_<EncodedRows>(m, "EncodedRows", "bf16 rows and where their encoded rows go."),
      field_by<const char*>(py::arg("kind"),
                            [](EncodedRows& made, const char* kind) { made.kind = activation_named(kind); }),
      field("rows", &EncodedRows::rows), field("num_tokens", &EncodedRows::num_tokens),
      field("columns", &EncodedRows::columns), field("out", &EncodedRows::out));
  def_fields(py::class_<DecodeShape>(m, "DecodeShape", "What bounds a decode launch."),
             field("num_tokens", &DecodeShape::num_tokens), field("top_k", &DecodeShape::top_k),
             field("num_experts", &DecodeShape::num_experts),
             field("shared_bytes", &DecodeShape::shared_bytes));
  def_fields(py::class_<PrefillTiles>(m, "PrefillTiles", "The tiles of a prefill launch, in device memory."),
             field("tiles", &PrefillTiles::tiles), field("count", &PrefillTiles::count),
             field("tokens", &PrefillTiles::tokens));
  def_fields(py::class_<PrefillRows>(m, "PrefillRows", "bf16 rows [num_tokens][hidden] of a prefill launch."),
             field("x", &PrefillRows::x), field("num_tokens", &PrefillRows::num_tokens),
             field("top_k", &PrefillRows::top_k));
  def_fields(
      py::class_<CombinedLayer>(m, "CombinedLayer",
                                "Both sides' shares of a layer and the hidden states they are added to."),
      field("outputs", &CombinedLayer::outputs), field("weights", &CombinedLayer::weights),
      field("where", &CombinedLayer::where), field("from_cpu", &CombinedLayer::from_cpu),
      field("num_tokens", &CombinedLayer::num_tokens), field("top_k", &CombinedLayer::top_k),
      field("hidden_size", &CombinedLayer::hidden_size), field("hidden", &CombinedLayer::hidden),
      field("joined_ns", &CombinedLayer::joined_ns, Address{}));
  m.def("tile_groups", &tile_groups, py::arg("begin"), py::arg("tile_tokens"),
        "int32 [tiles, 2] of group and first pair within it.");
  m.def("tile_tokens_for", &cuda::tile_tokens_for, py::arg("num_pairs"), py::arg("num_groups"));
}

void bind_placing(py::module_& m) {
  using cuda::MailboxShape;
  using cuda::PlacedLayer;
  using cuda::PlacementTables;
  using cuda::RoutedLayer;
  def_fields(py::class_<RoutedLayer>(m, "RoutedLayer", "A layer's routing in device memory."),
             field("ids", &RoutedLayer::ids), field("weights", &RoutedLayer::weights),
             field("normed", &RoutedLayer::normed), field("num_tokens", &RoutedLayer::num_tokens),
             field("layer", &RoutedLayer::layer), field("ahead", &RoutedLayer::ahead, Address{}));
  def_fields(
      py::class_<PlacementTables>(m, "PlacementTables", "What the device reads to place a layer's experts."),
      field("slots", &PlacementTables::slots), field("split", &PlacementTables::split),
      field("slot_base", &PlacementTables::slot_base), field("slot_stride", &PlacementTables::slot_stride),
      field("store_base", &PlacementTables::store_base),
      field("store_offsets", &PlacementTables::store_offsets),
      field("num_experts", &PlacementTables::num_experts),
      field("prices", &PlacementTables::prices, Address{}),
      field("kinds", &PlacementTables::kinds, Address{}), field("num_kinds", &PlacementTables::num_kinds, 1));
  def_fields(py::class_<PlacedLayer>(m, "PlacedLayer", "What a layer's routing becomes, in device memory."),
             field("groups", &PlacedLayer::groups), field("where", &PlacedLayer::where),
             field("num_on_cpu", &PlacedLayer::num_on_cpu));
  def_fields(py::class_<MailboxShape>(m, "MailboxShape", "What a mailbox has room for."),
             field("num_layers", &MailboxShape::num_layers), field("max_tokens", &MailboxShape::max_tokens),
             field("top_k", &MailboxShape::top_k), field("hidden", &MailboxShape::hidden),
             field("num_ahead", &MailboxShape::num_ahead, 0));
}

void bind_adapters(py::module_& m) {
  using cuda::AdaptedRows;
  using cuda::LowRankFactors;
  using cuda::LowRankInput;
  using cuda::LowRankOutput;
  using cuda::LowRankTable;
  m.def(
      "factors_bytes", [] { return sizeof(LowRankFactors); },
      "Bytes of one matrix's entry in a table of factors.");
  def_fields(py::class_<LowRankTable>(m, "LowRankTable", "Adapters' factors of a product in device memory."),
             field("factors", &LowRankTable::factors), field("num_entries", &LowRankTable::num_entries),
             field("stride", &LowRankTable::stride), field("first", &LowRankTable::first),
             field("count", &LowRankTable::count), field("max_rank", &LowRankTable::max_rank));
  def_fields(
      py::class_<AdaptedRows>(m, "AdaptedRows", "The adapter of each token, and the rows of a product."),
      field("adapters", &AdaptedRows::adapters), field("entries", &AdaptedRows::entries, Address{}),
      field("where", &AdaptedRows::where, Address{}), field("num_tokens", &AdaptedRows::num_tokens),
      field("per_token", &AdaptedRows::per_token));
  def_fields(py::class_<LowRankInput>(m, "LowRankInput", "Rows that A is multiplied with, bf16 or f32."),
             field("x", &LowRankInput::x), field("is_f32", &LowRankInput::is_f32),
             field("divisor", &LowRankInput::divisor), field("columns", &LowRankInput::columns),
             field("stride", &LowRankInput::stride));
  def_fields(py::class_<LowRankOutput>(m, "LowRankOutput", "Rows that receive B (A x), bf16 or f32."),
             field("y", &LowRankOutput::y), field("is_f32", &LowRankOutput::is_f32),
             field("adds", &LowRankOutput::adds), field("width", &LowRankOutput::width),
             field("stride", &LowRankOutput::stride));
}

}  // namespace

void bind_device_launches(py::module_& parent) {
  py::module_ m = parent.def_submodule("device", "Arguments of a device's kernels for one layer.");
  bind_experts(m);
  bind_placing(m);
  bind_adapters(m);
  bind_dense_launches(m);
}

}  // namespace twofold::bindings
