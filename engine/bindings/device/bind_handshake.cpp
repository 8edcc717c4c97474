#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <stdexcept>

#include "addresses.h"
#include "bind_device.h"
#include "cuda_error.h"
#include "device/mailbox_experts.h"
#include "handshake.h"
#include "pool_view.h"
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

template <typename T>
py::array_t<T> view(const T* data, py::ssize_t rows, py::ssize_t columns, const py::handle& owner) {
  return py::array_t<T>({rows, columns}, data, owner);
}

py::dict answer_of(const ServedStep& served) {
  return py::dict(py::arg("done") = served.state == PostState::kPosted, py::arg("layer") = served.layer,
                  py::arg("text") = served.text());
}

// Serves one step by a Python function, for tests and measurements: compute(layer, ids, weights, where,
// activations, results) fills results; the arrays are views of the mailbox.
py::dict serve_by_python(py::object self, uint32_t step, double limit_s, const py::function& compute) {
  auto& mailbox = self.cast<DeviceMailbox&>();
  const MailboxShape shape = mailbox.host().shape();
  ServedStep served;
  {
    const py::gil_scoped_release release;
    served = serve_step(
        mailbox.host(), step, std::chrono::nanoseconds(int64_t(limit_s * 1e9)),
        [&](int layer, const PostedLayer& posted) {
          const py::gil_scoped_acquire acquire;
          const py::ssize_t tokens = posted.num_tokens;
          compute(layer, view(posted.ids, tokens, shape.top_k, self),
                  view(posted.weights, tokens, shape.top_k, self),
                  view(posted.where, tokens, shape.top_k, self),
                  view(posted.activations, tokens, shape.hidden, self),
                  view(posted.results, tokens, shape.hidden, self));
        },
        [](int, const PostedLayer&) {});
  }
  return answer_of(served);
}

// Serves steps with the CPU's experts, without the GIL.
class StepServer {
 public:
  StepServer(DeviceMailbox& mailbox, const PoolView& pool, const ExpertStore& store)
      : mailbox_(mailbox), experts_(pool, store) {}

  py::dict serve(uint32_t step, double limit_s) {
    ServedStep served;
    {
      const py::gil_scoped_release release;
      const int top_k = mailbox_.host().shape().top_k;
      served = serve_step(
          mailbox_.host(), step, std::chrono::nanoseconds(int64_t(limit_s * 1e9)),
          [&](int layer, const PostedLayer& posted) { experts_.compute(layer, posted, top_k); },
          [](int, const PostedLayer&) {});
    }
    return answer_of(served);
  }

 private:
  DeviceMailbox& mailbox_;
  MailboxExperts experts_;
};

}  // namespace

void bind_handshake(py::module_& m, DeviceClass& device) {
  py::class_<DeviceMailbox>(m, "DeviceMailbox", "What a decode graph and the CPU share, in mapped memory.",
                            py::module_local())
      .def_property_readonly("address",
                             [](const DeviceMailbox& mailbox) { return uint64_t(mailbox.device_address()); })
      .def_property_readonly("results",
                             [](const DeviceMailbox& mailbox) { return uint64_t(mailbox.device_results()); })
      .def(
          "wait",
          [](DeviceMailbox& mailbox, const std::string& kind, int layer, uint64_t step, uint64_t num_on_cpu,
             double limit_s, uint64_t stream) {
            mailbox.enqueue_wait(kind_named(kind), layer, pointer<uint32_t>(step),
                                 pointer<uint32_t>(num_on_cpu), int64_t(limit_s * 1e9), stream_of(stream));
          },
          py::kw_only(), py::arg("kind"), py::arg("layer"), py::arg("step"), py::arg("num_on_cpu"),
          py::arg("limit_s"), py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def(
          "joined_ns",
          [](const DeviceMailbox& mailbox, int layer) { return uint64_t(mailbox.device_joined_ns(layer)); },
          py::arg("layer"), "Where the device notes when the layer's shares have come together.")
      .def("serve", &serve_by_python, py::arg("step"), py::arg("limit_s"), py::arg("compute"))
      .def("abort", [](DeviceMailbox& mailbox) { mailbox.host().abort(); })
      .def("reset", [](DeviceMailbox& mailbox) { mailbox.host().reset(); });
  py::class_<StepServer>(m, "StepServer", "The CPU's part of decode graphs: experts of a store on a pool.",
                         py::module_local())
      .def("serve", &StepServer::serve, py::arg("step"), py::arg("limit_s"));
  device
      .def(
          "mailbox",
          [](DeviceApi&, const cuda::MailboxShape& shape) { return std::make_unique<DeviceMailbox>(shape); },
          py::arg("shape"))
      .def(
          "step_server",
          [](DeviceApi&, DeviceMailbox& mailbox, const PoolView& pool, const ExpertStore& store) {
            return std::make_unique<StepServer>(mailbox, pool, store);
          },
          py::arg("mailbox"), py::arg("pool"), py::arg("store"), py::keep_alive<0, 2>(),
          py::keep_alive<0, 3>(), py::keep_alive<0, 4>())
      .def(
          "begin_step",
          [](DeviceApi&, uint64_t step, uint64_t stream) {
            check_cuda(cuda::launch_begin_step(pointer<uint32_t>(step), stream_of(stream)), "begin_step");
          },
          py::arg("step"), py::arg("stream"), "Counts the step.")
      .def(
          "place",
          [](DeviceApi&, const cuda::RoutedLayer& routed, const cuda::PlacementTables& tables,
             const cuda::PlacedLayer& placed, const cuda::MailboxShape& shape, uint64_t mailbox,
             uint64_t step, uint64_t stream) {
            check_cuda(cuda::launch_place(routed, tables, placed, shape, pointer<void>(mailbox),
                                          pointer<uint32_t>(step), stream_of(stream)),
                       "place");
          },
          py::arg("routed"), py::arg("tables"), py::arg("placed"), py::arg("shape"), py::kw_only(),
          py::arg("mailbox"), py::arg("step"), py::arg("stream"),
          "Groups a layer's pairs and posts them to the mailbox; 0: posts nothing.")
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
