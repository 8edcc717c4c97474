#include "cuda_error.h"
#include "cuda_module.h"
#include "dense_layer.h"
#include "device/addresses.h"

namespace py = pybind11;

namespace twofold::bindings {
void bind_dense(py::module_& m) {
  using cuda::DecodeAttention;
  using cuda::KvPages;
  using cuda::QkvRows;
  py::class_<KvPages>(m, "KvPages",
                      "One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim].",
                      py::module_local())
      .def(py::init([](uint64_t keys, uint64_t values, int page_size, int num_kv_heads, int head_dim) {
             return KvPages{pointer<void>(keys), pointer<void>(values), page_size, num_kv_heads, head_dim};
           }),
           py::kw_only(), py::arg("keys"), py::arg("values"), py::arg("page_size"), py::arg("num_kv_heads"),
           py::arg("head_dim"));
  py::class_<QkvRows>(m, "QkvRows", "Rows of a projection to queries, keys and values, and how they turn.",
                      py::module_local())
      .def(py::init([](uint64_t qkv, int num_tokens, int num_heads, uint64_t q_norm, uint64_t k_norm,
                       float epsilon, uint64_t cos, uint64_t sin, int rotary, uint64_t slot_mapping,
                       uint64_t v_norm) {
             return QkvRows{pointer<void>(qkv),
                            num_tokens,
                            num_heads,
                            pointer<float>(q_norm),
                            pointer<float>(k_norm),
                            epsilon,
                            pointer<float>(cos),
                            pointer<float>(sin),
                            rotary,
                            pointer<int64_t>(slot_mapping),
                            pointer<float>(v_norm)};
           }),
           py::kw_only(), py::arg("qkv"), py::arg("num_tokens"), py::arg("num_heads"), py::arg("q_norm"),
           py::arg("k_norm"), py::arg("epsilon"), py::arg("cos"), py::arg("sin"), py::arg("rotary"),
           py::arg("slot_mapping"), py::arg("v_norm") = 0);
  py::class_<DecodeAttention>(m, "DecodeAttention", "One query per sequence over its pages.",
                              py::module_local())
      .def(py::init([](uint64_t q, uint64_t page_tables, uint64_t seq_lens, int num_sequences, int num_heads,
                       int max_pages, int max_length, float scale, int window, uint64_t sinks, int chunk) {
             return DecodeAttention{pointer<void>(q),
                                    pointer<int32_t>(page_tables),
                                    pointer<int32_t>(seq_lens),
                                    num_sequences,
                                    num_heads,
                                    max_pages,
                                    max_length,
                                    scale,
                                    window,
                                    pointer<float>(sinks),
                                    chunk};
           }),
           py::kw_only(), py::arg("q"), py::arg("page_tables"), py::arg("seq_lens"), py::arg("num_sequences"),
           py::arg("num_heads"), py::arg("max_pages"), py::arg("max_length"), py::arg("scale"),
           py::arg("window"), py::arg("sinks") = 0, py::arg("chunk") = 0);
  // shape: _core.RouterShape
  m.def(
      "route",
      [](uint64_t logits, uint64_t bias, int num_tokens, int num_experts, const kernels::RouterShape& shape,
         uint64_t ids, uint64_t weights, uint64_t stream) {
        check_cuda(
            cuda::launch_route(pointer<float>(logits), pointer<float>(bias), num_tokens, num_experts, shape,
                               pointer<int32_t>(ids), pointer<float>(weights), stream_of(stream)),
            "route");
      },
      py::arg("logits"), py::arg("bias"), py::arg("num_tokens"), py::arg("num_experts"), py::arg("shape"),
      py::arg("ids"), py::arg("weights"), py::arg("stream"));
  m.def(
      "rope_store",
      [](const QkvRows& rows, const KvPages& pages, uint64_t q, uint64_t stream) {
        check_cuda(cuda::launch_rope_store(rows, pages, pointer<void>(q), stream_of(stream)), "rope_store");
      },
      py::arg("rows"), py::arg("pages"), py::kw_only(), py::arg("q"), py::arg("stream"));
  m.def("attention_workspace_bytes", &cuda::attention_workspace_bytes, py::kw_only(),
        py::arg("num_sequences"), py::arg("num_heads"), py::arg("head_dim"), py::arg("max_length"));
  m.def(
      "decode_attention",
      [](const DecodeAttention& attention, const KvPages& pages, uint64_t workspace, uint64_t out,
         uint64_t stream) {
        check_cuda(cuda::launch_decode_attention(attention, pages, pointer<float>(workspace),
                                                 pointer<void>(out), stream_of(stream)),
                   "decode_attention");
      },
      py::arg("attention"), py::arg("pages"), py::kw_only(), py::arg("workspace"), py::arg("out"),
      py::arg("stream"));
}

}  // namespace twofold::bindings
