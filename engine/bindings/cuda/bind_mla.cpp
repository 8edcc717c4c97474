#include "cuda_error.h"
#include "cuda_module.h"
#include "device/addresses.h"
#include "mla_layer.h"

namespace py = pybind11;

namespace twofold::bindings {

void bind_mla(py::module_& m) {
  using cuda::MlaDecode;
  using cuda::MlaPages;
  using cuda::MlaRows;
  py::class_<MlaPages>(m, "MlaPages", "One layer's latents: bf16 [pages, page_size, latent + rope].",
                       py::module_local())
      .def(py::init([](uint64_t rows, int page_size, int latent, int rope) {
             return MlaPages{pointer<void>(rows), page_size, latent, rope};
           }),
           py::arg("rows"), py::arg("page_size"), py::arg("latent"), py::arg("rope"));
  py::class_<MlaRows>(m, "MlaRows", "What latent attention's projections give, and where it goes.",
                      py::module_local())
      .def(py::init([](uint64_t compressed, int64_t stride, uint64_t queries, int num_tokens, int num_heads,
                       int nope, uint64_t norm, float epsilon, uint64_t cos, uint64_t sin, bool neighbours,
                       uint64_t slot_mapping) {
             return MlaRows{pointer<void>(compressed),
                            stride,
                            pointer<void>(queries),
                            num_tokens,
                            num_heads,
                            nope,
                            pointer<float>(norm),
                            epsilon,
                            pointer<float>(cos),
                            pointer<float>(sin),
                            neighbours,
                            pointer<int64_t>(slot_mapping)};
           }),
           py::kw_only(), py::arg("compressed"), py::arg("stride"), py::arg("queries"), py::arg("num_tokens"),
           py::arg("num_heads"), py::arg("nope"), py::arg("norm"), py::arg("epsilon"), py::arg("cos"),
           py::arg("sin"), py::arg("neighbours"), py::arg("slot_mapping"));
  py::class_<MlaDecode>(m, "MlaDecode", "One absorbed query per sequence and head.", py::module_local())
      .def(py::init([](uint64_t absorbed, uint64_t page_tables, uint64_t lengths, int num_sequences,
                       int num_heads, int max_pages, int max_length, float scale) {
             return MlaDecode{pointer<void>(absorbed),
                              pointer<int32_t>(page_tables),
                              pointer<int32_t>(lengths),
                              num_sequences,
                              num_heads,
                              max_pages,
                              max_length,
                              scale};
           }),
           py::kw_only(), py::arg("absorbed"), py::arg("page_tables"), py::arg("lengths"),
           py::arg("num_sequences"), py::arg("num_heads"), py::arg("max_pages"), py::arg("max_length"),
           py::arg("scale"));
  m.def(
      "mla_store",
      [](const MlaRows& rows, const MlaPages& pages, uint64_t absorbed, uint64_t stream) {
        check_cuda(cuda::launch_mla_store(rows, pages, pointer<void>(absorbed), stream_of(stream)),
                   "mla_store");
      },
      py::arg("rows"), py::arg("pages"), py::arg("absorbed"), py::arg("stream"));
  m.def("mla_workspace_bytes", &cuda::mla_workspace_bytes, py::arg("num_sequences"), py::arg("num_heads"),
        py::arg("latent"), py::arg("max_length"));
  m.def(
      "mla_decode",
      [](const MlaDecode& decode, const MlaPages& pages, uint64_t workspace, uint64_t out, uint64_t stream) {
        check_cuda(cuda::launch_mla_decode(decode, pages, pointer<float>(workspace), pointer<void>(out),
                                           stream_of(stream)),
                   "mla_decode");
      },
      py::arg("decode"), py::arg("pages"), py::arg("workspace"), py::arg("out"), py::arg("stream"));
}

}  // namespace twofold::bindings
