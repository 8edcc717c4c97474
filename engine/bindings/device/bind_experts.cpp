#include <pybind11/numpy.h>

#include <stdexcept>

#include "addresses.h"
#include "bind_device.h"
#include "cuda_error.h"
#include "expert_layer.h"
#include "launch_shapes.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

kernels::WeightFormat named_format(const std::string& name) {
  std::string known;
  for (int f = 0; f < kernels::kNumWeightFormats; ++f) {
    if (name == kernels::kFormatLayouts[f].name) return kernels::WeightFormat(f);
    known += std::string(f ? ", " : "") + kernels::kFormatLayouts[f].name;
  }
  throw std::invalid_argument("weight format '" + name + "' given; one of " + known + " expected");
}

kernels::ActivationKind kind_named(const std::string& name) {
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
                               int intermediate) {
  const kernels::WeightFormat first = named_format(gate_up), second = named_format(down);
  if (hidden < 1 || intermediate < 1)
    throw std::invalid_argument("an expert needs at least one row and column");
  const int64_t matrix = kernels::packed_bytes(first, intermediate, hidden);
  return {first, second, hidden, intermediate, matrix, 2 * matrix};
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

}  // namespace

void bind_experts(py::module_& m) {
  using cuda::ExpertBuffers;
  using cuda::ExpertGroups;
  using cuda::ExpertLayout;
  py::class_<ExpertLayout>(m, "ExpertLayout", "One expert as panels: gate, up, down, one after the other.",
                           py::module_local())
      .def(py::init(&make_layout), py::arg("gate_up"), py::arg("down"), py::arg("hidden"),
           py::arg("intermediate"))
      .def_property_readonly("bytes",
                             [](const ExpertLayout& layout) {
                               return layout.down_offset +
                                      kernels::packed_bytes(layout.down, layout.hidden, layout.intermediate);
                             })
      .def_property_readonly(
          "activations",
          [](const ExpertLayout& layout) { return name_of(cuda::activation_of(layout.gate_up)); })
      .def("encoded_bytes", &cuda::encoded_bytes, py::arg("num_tokens"))
      .def("intermediate_bytes", &cuda::intermediate_bytes, py::arg("num_pairs"));
  py::class_<ExpertGroups>(m, "ExpertGroups", "Addresses of a layer's grouping in device memory.",
                           py::module_local())
      .def(py::init([](uint64_t num_groups, uint64_t weights, uint64_t begin, uint64_t pairs, int capacity) {
             return ExpertGroups{pointer<int32_t>(num_groups), pointer<uint64_t>(weights),
                                 pointer<int32_t>(begin), pointer<int32_t>(pairs), capacity};
           }),
           py::arg("num_groups"), py::arg("weights"), py::arg("begin"), py::arg("pairs"),
           py::arg("capacity"));
  py::class_<ExpertBuffers>(m, "ExpertBuffers", "Addresses of the experts' buffers in device memory.",
                            py::module_local())
      .def(py::init([](uint64_t encoded, uint64_t intermediate, uint64_t outputs, uint64_t gate_up) {
             return ExpertBuffers{pointer<void>(encoded), pointer<void>(intermediate),
                                  pointer<float>(outputs), pointer<float>(gate_up)};
           }),
           py::arg("encoded"), py::arg("intermediate"), py::arg("outputs"), py::arg("gate_up") = 0);

  m.def(
      "read_host",
      [](uint64_t mapped, uint64_t to, int64_t bytes, uint64_t stream) {
        check_cuda(cuda::launch_read_host(pointer<void>(mapped), pointer<void>(to), bytes, stream_of(stream)),
                   "read_host");
      },
      py::arg("mapped"), py::arg("to"), py::arg("bytes"), py::arg("stream"),
      "Mapped host memory to device memory, by a kernel.");
  m.def(
      "encode",
      [](const std::string& kind, uint64_t rows, int num_tokens, int columns, uint64_t out, uint64_t stream) {
        check_cuda(cuda::launch_encode(kind_named(kind), pointer<void>(rows), num_tokens, columns,
                                       pointer<void>(out), stream_of(stream)),
                   "encode");
      },
      py::arg("kind"), py::arg("rows"), py::arg("num_tokens"), py::arg("columns"), py::arg("out"),
      py::arg("stream"), "bf16 rows to encoded activation rows.");
  m.def(
      "decode_experts",
      [](const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers, int num_tokens,
         int top_k, int num_experts, int shared_bytes, uint64_t stream) {
        check_cuda(cuda::launch_decode_experts(layout, groups, buffers, num_tokens, top_k, num_experts,
                                               shared_bytes, stream_of(stream)),
                   "decode_experts");
      },
      py::arg("layout"), py::arg("groups"), py::arg("buffers"), py::arg("num_tokens"), py::arg("top_k"),
      py::arg("num_experts"), py::arg("shared_bytes"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
  m.def("tile_groups", &tile_groups, py::arg("begin"), py::arg("tile_tokens"),
        "int32 [tiles, 2] of group and first pair within it.");
  m.def("tile_tokens_for", &cuda::tile_tokens_for, py::arg("num_pairs"), py::arg("num_groups"));
  m.def(
      "prefill_experts",
      [](const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers, uint64_t tiles,
         int num_tiles, int tile_tokens, uint64_t x, int num_tokens, int top_k, uint64_t stream) {
        const cuda::PrefillTiles table{pointer<int32_t>(tiles), num_tiles, tile_tokens};
        check_cuda(cuda::launch_prefill_experts(layout, groups, buffers, table, pointer<void>(x), num_tokens,
                                                top_k, stream_of(stream)),
                   "prefill_experts");
      },
      py::arg("layout"), py::arg("groups"), py::arg("buffers"), py::arg("tiles"), py::arg("num_tiles"),
      py::arg("tile_tokens"), py::arg("x"), py::arg("num_tokens"), py::arg("top_k"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "combine",
      [](uint64_t outputs, uint64_t weights, uint64_t where, uint64_t from_cpu, int num_tokens, int top_k,
         int hidden_size, uint64_t hidden, uint64_t stream, uint64_t joined_ns) {
        check_cuda(
            cuda::launch_combine(pointer<float>(outputs), pointer<float>(weights), pointer<uint8_t>(where),
                                 pointer<float>(from_cpu), num_tokens, top_k, hidden_size,
                                 pointer<float>(hidden), pointer<int64_t>(joined_ns), stream_of(stream)),
            "combine");
      },
      py::arg("outputs"), py::arg("weights"), py::arg("where"), py::arg("from_cpu"), py::arg("num_tokens"),
      py::arg("top_k"), py::arg("hidden_size"), py::arg("hidden"), py::arg("stream"),
      py::arg("joined_ns") = 0);
}

}  // namespace twofold::bindings
