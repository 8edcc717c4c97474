#include "delta_layer.h"
#include "dense_layer.h"
#include "device/launch.h"
#include "indexer_layer.h"
#include "mla_layer.h"

namespace py = pybind11;

namespace twofold::bindings {

void bind_dense(DeviceClass& device) {
  def_launch(device, "route", &cuda::launch_route, py::kw_only(), py::arg("logits"), py::arg("bias"),
             py::arg("num_tokens"), py::arg("num_experts"), py::arg("shape"), py::arg("ids"),
             py::arg("weights"), py::arg("stream"));
  def_launch(device, "rope_store", &cuda::launch_rope_store, py::arg("rows"), py::arg("pages"), py::kw_only(),
             py::arg("q"), py::arg("stream"));
  def_launch(device, "decode_attention", &cuda::launch_decode_attention, py::arg("attention"),
             py::arg("pages"), py::kw_only(), py::arg("workspace"), py::arg("out"), py::arg("stream"));
  def_launch(device, "mla_store", &cuda::launch_mla_store, py::arg("rows"), py::arg("pages"), py::kw_only(),
             py::arg("absorbed"), py::arg("stream"));
  def_launch(device, "mla_decode", &cuda::launch_mla_decode, py::arg("decode"), py::arg("pages"),
             py::kw_only(), py::arg("workspace"), py::arg("out"), py::arg("stream"));
  def_launch(device, "index_store", &cuda::launch_index_store, py::arg("rows"), py::arg("pages"),
             py::kw_only(), py::arg("rotated"), py::arg("stream"));
  def_launch(device, "index_pool", &cuda::launch_index_pool, py::arg("pools"), py::arg("pages"),
             py::kw_only(), py::arg("stream"));
  def_launch(device, "index_choose", &cuda::launch_index_choose, py::arg("choice"), py::arg("pages"),
             py::kw_only(), py::arg("scores"), py::arg("stream"));
  def_launch(device, "delta", &cuda::launch_delta, py::arg("rows"), py::arg("records"), py::kw_only(),
             py::arg("out"), py::arg("stream"));
  device
      .def_static("attention_workspace_bytes", &cuda::attention_workspace_bytes, py::kw_only(),
                  py::arg("num_sequences"), py::arg("num_heads"), py::arg("head_dim"), py::arg("max_length"))
      .def_static("mla_workspace_bytes", &cuda::mla_workspace_bytes, py::kw_only(), py::arg("num_sequences"),
                  py::arg("num_heads"), py::arg("latent"), py::arg("max_length"));
}

}  // namespace twofold::bindings
