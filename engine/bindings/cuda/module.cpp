#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "cuda_device.h"
#include "device/bind_device.h"
#include "devices.h"

namespace py = pybind11;

namespace {

py::list devices() {
  std::string reason;
  py::list all;
  for (const twofold::DeviceInfo& device : twofold::find_devices(reason)) {
    all.append(py::dict(py::arg("index") = device.index, py::arg("name") = device.name,
                        py::arg("compute_capability") = device.compute_capability,
                        py::arg("num_multiprocessors") = device.num_multiprocessors,
                        py::arg("total_bytes") = device.total_bytes, py::arg("l2_bytes") = device.l2_bytes,
                        py::arg("can_map_host_memory") = device.can_map_host_memory,
                        py::arg("stream_memory_operations") = device.stream_memory_operations));
  }
  return all;
}

std::string why_no_device() {
  std::string reason;
  (void)twofold::find_devices(reason);
  return reason;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  // Its translators make our exceptions Python's, and its classes are ours too.
  py::module_::import("twofold._core");
  twofold::bindings::bind_device(m);
  m.def("open_device", &twofold::open_cuda_device, py::arg("index") = 0, "KernelError if it cannot be used.");
  m.doc() = "Twofold on CUDA: devices, expert slots, uploads and kernels.";
  m.def("devices", &devices, "One dict per device; sizes in bytes.");
  m.def("why_no_device", &why_no_device, "What the CUDA runtime says where devices() is empty.");
}
