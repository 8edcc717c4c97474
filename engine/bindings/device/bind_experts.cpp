#include "device/launch.h"
#include "expert_layer.h"

namespace py = pybind11;

namespace twofold::bindings {

void bind_experts(DeviceClass& device) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  def_launch(device, "read_host", &cuda::launch_read_host, py::arg("mapped"), py::arg("to"), py::arg("bytes"),
             py::arg("stream"), "Mapped host memory to device memory, by a kernel.");
  def_launch(device, "encode", &cuda::launch_encode, py::arg("rows"), py::arg("stream"));
  def_launch(device, "decode_experts", &cuda::launch_decode_experts, py::arg("layout"), py::arg("groups"),
             py::arg("buffers"), py::arg("shape"), py::arg("stream"), without_gil);
  def_launch(device, "prefill_experts", &cuda::launch_prefill_experts, py::arg("layout"), py::arg("groups"),
             py::arg("buffers"), py::arg("tiles"), py::arg("rows"), py::arg("stream"), without_gil);
  def_launch(device, "combine", &cuda::launch_combine, py::arg("layer"), py::arg("stream"));
}

}  // namespace twofold::bindings
