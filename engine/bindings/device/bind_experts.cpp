#include <memory>
#include <string>

#include "cuda_error.h"
#include "device/expert_stream.h"
#include "device/launch.h"
#include "expert_layer.h"
#include "low_rank_layer.h"
#include "owning.h"
#include "unpack_matrix.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

// ExpertStream with the launches that read an expert.
class __attribute__((visibility("hidden"))) BoundExpertStream {
 public:
  BoundExpertStream(std::shared_ptr<DeviceApi> api, const ExpertStore& store, double latency_us,
                    double bandwidth_gbps)
      : stream_(std::move(api), store, latency_us, bandwidth_gbps) {}

  void begin(int layer, int expert) { stream_.begin(layer, expert); }
  void enter(Address compute) { panels_ = stream_.enter({static_cast<void*>(compute)}); }
  void leave(Address compute) { stream_.leave({static_cast<void*>(compute)}); }
  size_t device_bytes() const { return stream_.device_bytes(); }

  void unpack(int matrix, Address out, bool is_bf16, Address stream) const {
    const ExpertShape& shape = stream_.store().shape();
    const FfnFormats& formats = stream_.layout().formats;
    const bool is_down = matrix == 2;
    const cuda::UnpackedMatrix unpacked{matrix == 0   ? formats.gate
                                        : matrix == 1 ? formats.up
                                                      : formats.down,
                                        matrix == 0   ? panels_.gate
                                        : matrix == 1 ? panels_.up
                                                      : panels_.down,
                                        is_down ? shape.hidden : shape.intermediate,
                                        is_down ? shape.intermediate : shape.hidden,
                                        out,
                                        is_bf16};
    check_cuda(cuda::launch_unpack_matrix(unpacked, stream), "unpack_matrix");
  }

  void read_biases(Address out, Address stream) const {
    const ExpertShape& shape = stream_.store().shape();
    check_cuda(cuda::launch_read_host(panels_.gate_bias, out,
                                      kernels::expert_bias_bytes(shape.hidden, shape.intermediate), stream),
               "read_host");
  }

 private:
  ExpertStream stream_;
  FfnPanels panels_{};
};

void bind_stream(py::module_& m, DeviceClass& device) {
  py::class_<BoundExpertStream, std::shared_ptr<BoundExpertStream>>(
      m, "ExpertStream", "Experts that pass through two staging slots, in order.", py::module_local())
      .def("begin", &BoundExpertStream::begin, py::arg("layer"), py::arg("expert"), "Begins an upload.")
      .def("enter", &BoundExpertStream::enter, py::arg("stream"),
           "Work given to the stream from now on may read the expert that was begun first.")
      .def("unpack", &BoundExpertStream::unpack, py::arg("matrix"), py::arg("out"), py::arg("is_bf16"),
           py::arg("stream"), "Gate (0), up (1) or down (2) of the expert entered last, as rows.")
      .def("read_biases", &BoundExpertStream::read_biases, py::arg("out"), py::arg("stream"),
           "Biases of gate, up and down in float32, each aligned to 16 numbers.")
      .def("leave", &BoundExpertStream::leave, py::arg("stream"),
           "The stream has been given all that reads the expert entered last.")
      .def_property_readonly("device_bytes", &BoundExpertStream::device_bytes);
  device.def(
      "expert_stream",
      [](std::shared_ptr<DeviceApi> api, std::shared_ptr<ExpertStore> store, double latency_us,
         double bandwidth_gbps) {
        return owning(std::make_unique<BoundExpertStream>(std::move(api), *store, latency_us, bandwidth_gbps),
                      store);
      },
      py::arg("store"), py::arg("link_latency_us"), py::arg("link_bandwidth_gbps"),
      "Pins the store where it can. The link's figures are a beginning: it learns the real ones.");
}

}  // namespace

void bind_experts(py::module_& m, DeviceClass& device) {
  bind_stream(m, device);
  const py::call_guard<py::gil_scoped_release> without_gil;
  def_launch(device, "read_host", &cuda::launch_read_host, py::arg("mapped"), py::arg("to"), py::arg("bytes"),
             py::arg("stream"), "Mapped host memory to device memory, by a kernel.");
  def_launch(device, "encode", &cuda::launch_encode, py::arg("rows"), py::arg("stream"));
  def_launch(device, "decode_experts", &cuda::launch_decode_experts, py::arg("layout"), py::arg("groups"),
             py::arg("buffers"), py::arg("shape"), py::arg("stream"), without_gil);
  def_launch(device, "prefill_experts", &cuda::launch_prefill_experts, py::arg("layout"), py::arg("groups"),
             py::arg("buffers"), py::arg("tiles"), py::arg("rows"), py::arg("stream"), without_gil);
  def_launch(device, "low_rank_gather", &cuda::launch_low_rank_gather, py::arg("table"), py::arg("rows"),
             py::arg("ids"), py::arg("t"), py::arg("stream"));
  def_launch(device, "low_rank_down", &cuda::launch_low_rank_down, py::arg("table"), py::arg("rows"),
             py::arg("input"), py::arg("t"), py::arg("stream"));
  def_launch(device, "low_rank_up", &cuda::launch_low_rank_up, py::arg("table"), py::arg("rows"),
             py::arg("t"), py::arg("output"), py::arg("stream"));
  def_launch(device, "combine", &cuda::launch_combine, py::arg("layer"), py::arg("stream"));
}

}  // namespace twofold::bindings
