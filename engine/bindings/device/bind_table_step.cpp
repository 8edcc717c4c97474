#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "addresses.h"
#include "bind_device.h"
#include "device/table_step.h"
#include "handshake.h"
#include "owning.h"
#include "pool_view.h"
#include "served_step.h"

namespace py = pybind11;

namespace twofold::bindings {
void bind_table_step(py::module_& m, DeviceClass& device) {
  py::class_<TableStep, std::shared_ptr<TableStep>>(
      m, "TableStep", "The host's part of a step that the device places from its tables.", py::module_local())
      .def(
          "begin",
          [](TableStep& step, int64_t number, std::vector<int64_t> requests, std::vector<int32_t> positions,
             Address stream, std::vector<uint8_t> generated, std::vector<uint8_t> verified) {
            if (requests.size() != positions.size())
              throw std::invalid_argument("a table step needs one position per request row");
            step.begin({number, std::move(requests), std::move(positions), std::move(generated),
                        std::move(verified)},
                       {stream});
          },
          py::arg("step"), py::arg("requests"), py::arg("positions"), py::arg("stream"),
          py::arg("generated") = std::vector<uint8_t>{}, py::arg("verified") = std::vector<uint8_t>{},
          py::call_guard<py::gil_scoped_release>())
      .def(
          "serve",
          [](TableStep& step, uint32_t number, double limit_s) {
            return served_dict([&] { return step.serve(number, nanoseconds_of(limit_s)); });
          },
          py::arg("number"), py::arg("limit_s"),
          "{done, layer, text}; not done: wait until the device is idle, then give_up.")
      .def(
          "end", [](TableStep& step, Address stream) { step.end({stream}); }, py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "confirm", [](TableStep& step) { return served_dict([&] { return step.confirm(); }); },
          "As serve: whether the device took every answer.")
      .def(
          "give_up", [](TableStep& step, Address stream) { step.give_up({stream}); }, py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("cpu_us", &TableStep::cpu_us, "Spent on the CPU's experts since the start.");
  device.def(
      "table_step",
      [](DeviceApi&, std::shared_ptr<DeviceMailbox> mailbox, std::shared_ptr<MoeExecutor> executor,
         std::shared_ptr<DeviceAccelerator> accelerator, const PoolView& pool) {
        auto step = std::make_unique<TableStep>(mailbox->host(), *executor, *accelerator, pool);
        return owning(std::move(step), mailbox, executor, accelerator, pool);
      },
      py::arg("mailbox"), py::arg("executor"), py::arg("accelerator"), py::arg("pool"));
}

}  // namespace twofold::bindings
