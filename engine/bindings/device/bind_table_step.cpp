#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <utility>

#include "bind_device.h"
#include "device/table_step.h"
#include "handshake.h"
#include "pool_view.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

StreamHandle on(uintptr_t stream) { return {reinterpret_cast<void*>(stream)}; }

template <typename Call>
py::dict answer_of(Call call) {
  ServedStep served;
  {
    const py::gil_scoped_release release;
    served = call();
  }
  return py::dict(py::arg("done") = served.state == PostState::kPosted, py::arg("layer") = served.layer,
                  py::arg("text") = served.text());
}

}  // namespace

void bind_table_step(py::module_& m, DeviceClass& device) {
  py::class_<TableStep>(m, "TableStep", "The host's part of a step that the device places from its tables.",
                        py::module_local())
      .def(
          "begin",
          [](TableStep& step, int64_t number, std::vector<int64_t> requests, std::vector<int32_t> positions,
             uintptr_t stream, std::vector<uint8_t> generated) {
            if (requests.size() != positions.size())
              throw std::invalid_argument("a table step needs one position per request row");
            step.begin({number, std::move(requests), std::move(positions), std::move(generated)}, on(stream));
          },
          py::arg("step"), py::arg("requests"), py::arg("positions"), py::arg("stream"),
          py::arg("generated") = std::vector<uint8_t>{}, py::call_guard<py::gil_scoped_release>())
      .def(
          "serve",
          [](TableStep& step, uint32_t number, double limit_s) {
            const std::chrono::nanoseconds limit(int64_t(limit_s * 1e9));
            return answer_of([&] { return step.serve(number, limit); });
          },
          py::arg("number"), py::arg("limit_s"),
          "{done, layer, text}; not done: wait until the device is idle, then give_up.")
      .def(
          "end", [](TableStep& step, uintptr_t stream) { step.end(on(stream)); }, py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "confirm", [](TableStep& step) { return answer_of([&] { return step.confirm(); }); },
          "As serve: whether the device took every answer.")
      .def(
          "give_up", [](TableStep& step, uintptr_t stream) { step.give_up(on(stream)); }, py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("cpu_us", &TableStep::cpu_us, "Spent on the CPU's experts since the start.");
  device.def(
      "table_step",
      [](DeviceApi&, DeviceMailbox& mailbox, MoeExecutor& executor, CudaAccelerator& accelerator,
         const PoolView& pool) {
        return std::make_unique<TableStep>(mailbox.host(), executor, accelerator, pool);
      },
      py::arg("mailbox"), py::arg("executor"), py::arg("accelerator"), py::arg("pool"),
      py::keep_alive<0, 2>(), py::keep_alive<0, 3>(), py::keep_alive<0, 4>(), py::keep_alive<0, 5>());
}

}  // namespace twofold::bindings
