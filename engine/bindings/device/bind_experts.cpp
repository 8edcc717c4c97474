#include "addresses.h"
#include "bind_device.h"
#include "cuda_error.h"
#include "expert_layer.h"

namespace py = pybind11;

namespace twofold::bindings {

void bind_experts(DeviceClass& device) {
  using cuda::ExpertBuffers;
  using cuda::ExpertGroups;
  using cuda::ExpertLayout;
  device
      .def(
          "read_host",
          [](DeviceApi&, uint64_t mapped, uint64_t to, int64_t bytes, uint64_t stream) {
            check_cuda(
                cuda::launch_read_host(pointer<void>(mapped), pointer<void>(to), bytes, stream_of(stream)),
                "read_host");
          },
          py::arg("mapped"), py::arg("to"), py::arg("bytes"), py::arg("stream"),
          "Mapped host memory to device memory, by a kernel.")
      .def(
          "encode",
          [](DeviceApi&, const cuda::EncodedRows& rows, uint64_t stream) {
            check_cuda(cuda::launch_encode(rows, stream_of(stream)), "encode");
          },
          py::arg("rows"), py::arg("stream"))
      .def(
          "decode_experts",
          [](DeviceApi&, const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers,
             const cuda::DecodeShape& shape, uint64_t stream) {
            check_cuda(cuda::launch_decode_experts(layout, groups, buffers, shape, stream_of(stream)),
                       "decode_experts");
          },
          py::arg("layout"), py::arg("groups"), py::arg("buffers"), py::arg("shape"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "prefill_experts",
          [](DeviceApi&, const ExpertLayout& layout, const ExpertGroups& groups, const ExpertBuffers& buffers,
             const cuda::PrefillTiles& tiles, const cuda::PrefillRows& rows, uint64_t stream) {
            check_cuda(cuda::launch_prefill_experts(layout, groups, buffers, tiles, rows, stream_of(stream)),
                       "prefill_experts");
          },
          py::arg("layout"), py::arg("groups"), py::arg("buffers"), py::arg("tiles"), py::arg("rows"),
          py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def(
          "combine",
          [](DeviceApi&, const cuda::CombinedLayer& layer, uint64_t stream) {
            check_cuda(cuda::launch_combine(layer, stream_of(stream)), "combine");
          },
          py::arg("layer"), py::arg("stream"));
}

}  // namespace twofold::bindings
