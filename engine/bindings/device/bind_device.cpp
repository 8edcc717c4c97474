#include "bind_device.h"

#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device_accelerator.h"
#include "device/device_api.h"
#include "device/device_memory.h"
#include "device/link_probe.h"
#include "owning.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

void raise(const char* name, const std::exception& error) {
  py::set_error(py::module_::import("twofold.api.errors").attr(name), error.what());
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const DeviceOutOfMemory& error) {
    raise("CapacityError", error);
  } catch (const DeviceError& error) {
    raise("KernelError", error);
  }
}

py::dict facts(DeviceApi& api) {
  DeviceFacts f;
  require(api.facts(f), "be asked for its facts");
  return py::dict(py::arg("index") = f.index, py::arg("name") = f.name,
                  py::arg("total_bytes") = f.total_bytes, py::arg("free_bytes") = f.free_bytes,
                  py::arg("link") = f.link, py::arg("link_gbps") = f.link_gbps);
}

py::dict upload_probe(DeviceApi& api, const ExpertStore& store, int num_uploads, bool demand) {
  UploadProbe probe;
  {
    const py::gil_scoped_release release;
    probe = probe_uploads(api, store, num_uploads, demand);
  }
  return py::dict(py::arg("bytes") = probe.bytes, py::arg("us") = probe.us,
                  py::arg("busy_us") = probe.busy_us, py::arg("batches") = probe.batches,
                  py::arg("pinned") = probe.pinned);
}

}  // namespace

void bind_device(py::module_& m) {
  py::module_::import("twofold._core");
  py::register_exception_translator(&translate);
  py::class_<LinkProbe>(m, "LinkProbe", "Times copies from pinned memory to the device.", py::module_local())
      .def("copies_us", &LinkProbe::copies_us, py::arg("bytes"), py::arg("count") = 1,
           py::arg("asleep") = false, py::call_guard<py::gil_scoped_release>(),
           "The device's time for copies in one call; waits for them.");
  DeviceClass device(m, "Device", "A device and its kernels.", py::module_local());
  device.def("facts", &facts, "Sizes in bytes; link_gbps is what the link carries at most, 0 where unknown.")
      .def(
          "accelerator",
          [](std::shared_ptr<DeviceApi> api, std::shared_ptr<ExpertStore> store, const CostModel& cost,
             const LayerSchedulerConfig& config, std::vector<std::shared_ptr<DeviceApi>> others) {
            others.insert(others.begin(), std::move(api));
            return owning(std::make_unique<DeviceAccelerator>(others, *store, cost, config), store);
          },
          py::arg("store"), py::arg("cost"), py::arg("config"),
          py::arg("others") = std::vector<std::shared_ptr<DeviceApi>>{},
          "Pins the store where it can and takes the slots' memory, on this device and `others`.")
      .def("probe_uploads", &upload_probe, py::arg("store"), py::arg("num_uploads"), py::arg("demand"),
           "Uploads of the store's experts by an upload engine of its own: bytes, us, busy_us, batches, "
           "pinned.")
      .def(
          "link_probe",
          [](std::shared_ptr<DeviceApi> api, size_t most_bytes) {
            return std::make_unique<LinkProbe>(std::move(api), most_bytes);
          },
          py::arg("most_bytes"));
  bind_dense(device);
  bind_experts(m, device);
  bind_handshake(m, device);
  bind_table_step(m, device);
}

}  // namespace twofold::bindings
