#include "cuda_error.h"
#include "cuda_module.h"
#include "delta_layer.h"
#include "device/addresses.h"

namespace py = pybind11;

namespace twofold::bindings {

void bind_delta(py::module_& m) {
  using cuda::DeltaRecords;
  using cuda::DeltaRows;
  py::class_<DeltaRecords>(m, "DeltaRecords", "One layer's records of gated delta nets.", py::module_local())
      .def(py::init([](uint64_t slabs, uint64_t tail, int num_k_heads, int num_v_heads, int key_dim,
                       int value_dim, int taps) {
             return DeltaRecords{pointer<float>(slabs),
                                 pointer<void>(tail),
                                 num_k_heads,
                                 num_v_heads,
                                 key_dim,
                                 value_dim,
                                 taps};
           }),
           py::kw_only(), py::arg("slabs"), py::arg("tail"), py::arg("num_k_heads"), py::arg("num_v_heads"),
           py::arg("key_dim"), py::arg("value_dim"), py::arg("taps"));
  py::class_<DeltaRows>(m, "DeltaRows", "What a gated delta net's projections give of tokens.",
                        py::module_local())
      .def(py::init([](uint64_t projected, int64_t stride, uint64_t conv, uint64_t decay_rate,
                       uint64_t decay_bias, uint64_t positions, uint64_t records, int num_sequences,
                       int num_tokens) {
             return DeltaRows{pointer<void>(projected),
                              stride,
                              pointer<float>(conv),
                              pointer<float>(decay_rate),
                              pointer<float>(decay_bias),
                              pointer<int64_t>(positions),
                              pointer<int32_t>(records),
                              num_sequences,
                              num_tokens};
           }),
           py::kw_only(), py::arg("projected"), py::arg("stride"), py::arg("conv"), py::arg("decay_rate"),
           py::arg("decay_bias"), py::arg("positions"), py::arg("records"), py::arg("num_sequences"),
           py::arg("num_tokens"));
  m.def(
      "delta",
      [](const DeltaRows& rows, const DeltaRecords& records, uint64_t out, uint64_t stream) {
        check_cuda(cuda::launch_delta(rows, records, pointer<float>(out), stream_of(stream)), "delta");
      },
      py::arg("rows"), py::arg("records"), py::arg("out"), py::arg("stream"));
}

}  // namespace twofold::bindings
