#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "device/launch.h"
#include "device/mailbox_experts.h"
#include "handshake.h"
#include "pool_view.h"
#include "served_step.h"
#include "step_control.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

Handshake kind_named(const std::string& name) {
  for (const Handshake kind : {Handshake::kKernels, Handshake::kStreamMemory, Handshake::kHostFunction}) {
    if (name == name_of(kind)) return kind;
  }
  throw std::invalid_argument("handshake '" + name +
                              "' given; kernels, stream-memory or host-function expected");
}

// Serves steps with the CPU's experts, without the GIL.
class StepServer {
 public:
  StepServer(std::shared_ptr<DeviceMailbox> mailbox, const PoolView& pool, std::shared_ptr<ExpertStore> store)
      : mailbox_(std::move(mailbox)), pool_(pool), store_(std::move(store)), experts_(pool_, *store_) {}

  py::dict serve(uint32_t step, double limit_s) {
    const int top_k = mailbox_->host().shape().top_k;
    return served_dict([&] {
      return serve_step(
          mailbox_->host(), step, nanoseconds_of(limit_s),
          [&](int layer, const PostedLayer& posted) { experts_.compute(layer, posted, top_k); },
          [](int, const PostedLayer&) {});
    });
  }

 private:
  std::shared_ptr<DeviceMailbox> mailbox_;
  PoolView pool_;
  std::shared_ptr<ExpertStore> store_;
  MailboxExperts experts_;
};

}  // namespace

void bind_handshake(py::module_& m, DeviceClass& device) {
  def_launch(device, "begin_step", &cuda::launch_begin_step, py::arg("step"), py::arg("stream"),
             "Counts the step.");
  def_launch(device, "place", &cuda::launch_place, py::arg("routed"), py::arg("tables"), py::arg("placed"),
             py::arg("shape"), py::kw_only(), py::arg("mailbox"), py::arg("step"), py::arg("stream"),
             "Groups a layer's pairs and posts them to the mailbox; 0: posts nothing.");
  py::class_<DeviceMailbox, std::shared_ptr<DeviceMailbox>>(
      m, "DeviceMailbox", "Mapped memory shared by a decode graph and the CPU.", py::module_local())
      .def_property_readonly("address",
                             [](const DeviceMailbox& mailbox) { return uint64_t(mailbox.device_address()); })
      .def_property_readonly("results",
                             [](const DeviceMailbox& mailbox) { return uint64_t(mailbox.device_results()); })
      .def(
          "wait",
          [](DeviceMailbox& mailbox, const std::string& kind, int layer, Address step, Address num_on_cpu,
             double limit_s, Address stream) {
            mailbox.enqueue_wait(kind_named(kind), layer, step, num_on_cpu, nanoseconds_of(limit_s).count(),
                                 stream);
          },
          py::kw_only(), py::arg("kind"), py::arg("layer"), py::arg("step"), py::arg("num_on_cpu"),
          py::arg("limit_s"), py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def(
          "joined_ns",
          [](const DeviceMailbox& mailbox, int layer) { return uint64_t(mailbox.device_joined_ns(layer)); },
          py::arg("layer"), "Where the device notes when the layer's shares have come together.")
      .def("abort", [](DeviceMailbox& mailbox) { mailbox.host().abort(); })
      .def("reset", [](DeviceMailbox& mailbox) { mailbox.host().reset(); });
  py::class_<StepServer>(m, "StepServer", "The CPU side of decode graphs: experts of a store on a pool.",
                         py::module_local())
      .def("serve", &StepServer::serve, py::arg("step"), py::arg("limit_s"));
  device
      .def(
          "mailbox",
          [](DeviceApi&, const cuda::MailboxShape& shape) { return std::make_shared<DeviceMailbox>(shape); },
          py::arg("shape"))
      .def(
          "step_server",
          [](DeviceApi&, std::shared_ptr<DeviceMailbox> mailbox, const PoolView& pool,
             std::shared_ptr<ExpertStore> store) {
            return std::make_unique<StepServer>(std::move(mailbox), pool, std::move(store));
          },
          py::arg("mailbox"), py::arg("pool"), py::arg("store"))
      .def(
          "probe_handshakes",
          [](DeviceApi&, int hidden, int num_layers, int num_steps) {
            std::vector<HandshakeProbe> probes;
            {
              const py::gil_scoped_release release;
              probes = probe_handshakes(hidden, num_layers, num_steps);
            }
            py::list all;
            for (const HandshakeProbe& probe : probes)
              all.append(py::dict(py::arg("kind") = name_of(probe.kind), py::arg("works") = probe.works,
                                  py::arg("us") = probe.us, py::arg("why") = probe.why));
            const HandshakeChoice choice = choose_handshake(probes.data(), probes.size());
            return py::dict(py::arg("probes") = all,
                            py::arg("kind") = choice.found ? name_of(choice.kind) : "",
                            py::arg("reason") = choice.reason);
          },
          py::arg("hidden"), py::arg("num_layers") = 32, py::arg("num_steps") = 50,
          "Measures the ways to hand a layer over, and chooses.");
}

}  // namespace twofold::bindings
