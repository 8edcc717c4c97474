// What the tests in this folder see of the fake device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device/bind_device.h"
#include "device/device_accelerator.h"
#include "stress.h"

namespace py = pybind11;

namespace {

using twofold::fake::StressCounts;
using twofold::fake::StressShape;

py::dict run_stress(const py::kwargs& given) {
  StressShape shape;
  const auto take = [&given](const char* name, auto& field) {
    if (given.contains(name)) field = given[name].cast<std::remove_reference_t<decltype(field)>>();
  };
  take("seed", shape.seed);
  take("num_layers", shape.num_layers);
  take("num_experts", shape.num_experts);
  take("top_k", shape.top_k);
  take("num_slots", shape.num_slots);
  take("num_staging", shape.num_staging);
  take("num_steps", shape.num_steps);
  take("policy", shape.policy);
  take("prefetch", shape.prefetch);
  take("pinned", shape.pinned);
  take("table_steps", shape.table_steps);
  take("ahead", shape.ahead);
  take("most_delay_us", shape.most_delay_us);
  take("fail_issue", shape.fail_issue);
  take("fail_completion", shape.fail_completion);
  take("ignore_readers", shape.ignore_readers);
  take("ignore_uploads", shape.ignore_uploads);
  take("chunks", shape.chunks);
  const StressCounts counts = twofold::fake::stress(shape);
  py::dict out;
  out["reads"] = counts.reads;
  out["hits"] = counts.hits;
  out["cpu"] = counts.cpu;
  out["fetched"] = counts.fetched;
  out["begun_ahead"] = counts.begun_ahead;
  out["used_ahead"] = counts.used_ahead;
  out["landed"] = counts.landed;
  out["failed"] = counts.failed;
  out["held"] = counts.held;
  out["refused"] = counts.refused;
  out["lost_steps"] = counts.lost_steps;
  out["largest_batch"] = counts.largest_batch;
  out["mixed_batches"] = counts.mixed_batches;
  return out;
}

std::shared_ptr<twofold::DeviceApi> open_device(int index, size_t total_bytes, double bandwidth_gbps,
                                                bool refuse_pinning, double most_delay_us, double fail_issue,
                                                double fail_completion, double tick_us, bool refuse_read_only,
                                                const twofold::DeviceApi* beside) {
  twofold::fake::DeviceShape shape;
  shape.index = index;
  shape.total_bytes = total_bytes;
  shape.bandwidth_gbps = bandwidth_gbps;
  shape.refuse_pinning = refuse_pinning;
  shape.refuse_read_only = refuse_read_only;
  shape.tick_us = tick_us;
  shape.most_delay_us = most_delay_us;
  auto device =
      std::make_shared<twofold::fake::Device>(shape, dynamic_cast<const twofold::fake::Device*>(beside));
  device->set_failures(fail_issue, fail_completion);
  return device;
}

}  // namespace

// Has the interface of twofold._cuda.
PYBIND11_MODULE(twofold_fake, m) {
  m.doc() = "a fake device on host memory.";
  twofold::bindings::bind_device(m);
  m.def("open_device", &open_device, py::arg("index") = 0, py::arg("total_bytes") = size_t{1} << 28,
        py::arg("bandwidth_gbps") = 10.0, py::arg("refuse_pinning") = false, py::arg("most_delay_us") = 0.0,
        py::arg("fail_issue") = 0.0, py::arg("fail_completion") = 0.0, py::arg("tick_us") = 0.0,
        py::arg("refuse_read_only") = false, py::arg("beside") = nullptr);
  m.def(
      "spare",
      [](twofold::DeviceApi& device, uintptr_t address) {
        dynamic_cast<twofold::fake::Device&>(device).never_fails = reinterpret_cast<std::byte*>(address);
      },
      py::arg("device"), py::arg("address"), "Copies to this address never fail.");
  m.def(
      "link_correction",
      [](const twofold::DeviceAccelerator& a, int device) { return a.uploads(device).correction(); },
      py::arg("accelerator"), py::arg("device") = 0);
  m.def(
      "upload_counts",
      [](const twofold::DeviceAccelerator& a, int device) {
        const twofold::UploadCounts& c = a.uploads(device).counts();
        return py::dict(py::arg("landed") = c.landed, py::arg("failed") = c.failed,
                        py::arg("batches") = c.batches, py::arg("bytes") = c.bytes,
                        py::arg("busy_us") = c.busy_us, py::arg("held") = c.held);
      },
      py::arg("accelerator"), py::arg("device") = 0);
  m.def("stress", &run_stress,
        "Steps on a fake device; RuntimeError when a layer does not find its experts.");
}
