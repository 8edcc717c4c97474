// The dense operations. Each wrapper keeps the arrays it was given alive, checks shapes once when made, and
// releases the GIL while it computes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_ops.h"
#include "moe/decoder.h"
#include "ops/dense_attention.h"
#include "ops/dense_ffn.h"
#include "ops/dense_router.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using Arrays = std::vector<py::object>;
using MaybeArray = std::optional<py::array>;
using Packed = std::shared_ptr<PackedMatrix>;

const float* vector_or_null(const MaybeArray& array, const char* what, int64_t size) {
  return array ? expect_f32(view_of(*array), what, {size}) : nullptr;
}

py::object kept(const MaybeArray& array) { return array ? py::object(*array) : py::object(py::none()); }

// Refuses another shape; kAny: any.
const PackedMatrix* expect_packed(const PackedMatrix& matrix, const char* what, int64_t rows,
                                  int64_t columns) {
  if ((rows != kAny && matrix.rows() != rows) || (columns != kAny && matrix.columns() != columns)) {
    const auto size = [](int64_t n) { return n == kAny ? std::string("any") : std::to_string(n); };
    throw KernelFailure(std::string(what) + " is packed (" + size(matrix.rows()) + ", " +
                        size(matrix.columns()) + "); expected (" + size(rows) + ", " + size(columns) + ")");
  }
  return &matrix;
}

Packed pack(ThreadTeam& team, const std::vector<py::object>& parts) {
  std::vector<SourceMatrix> sources;
  for (size_t i = 0; i < parts.size(); ++i)
    sources.push_back(source_matrix(parts[i], "PackedMatrix: part " + std::to_string(i)));
  const py::gil_scoped_release release;
  try {
    return std::make_shared<PackedMatrix>(team, sources);
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(wrong.what());
  }
}

std::vector<std::string> formats_of(const PackedMatrix& matrix) {
  std::vector<std::string> names;
  for (const PackedMatrix::Segment& segment : matrix.segments())
    names.emplace_back(kernels::layout_of(segment.format).name);
  return names;
}

int positive(int value, const char* what) {
  if (value < 1)
    throw KernelFailure(std::string(what) + " is " + std::to_string(value) + "; expected at least 1");
  return value;
}

class __attribute__((visibility("hidden"))) BoundAttention {
 public:
  BoundAttention(ThreadTeam& team, const py::array& norm, const Packed& qkv, const MaybeArray& qkv_bias,
                 const MaybeArray& q_norm, const MaybeArray& k_norm, const Packed& o,
                 const MaybeArray& o_bias, int num_heads, int num_kv_heads, int head_dim, float eps,
                 float scale, std::optional<int> sliding_window)
      : arrays_{norm, kept(qkv_bias), kept(q_norm), kept(k_norm), kept(o_bias)},
        qkv_(qkv),
        o_(o),
        block_(chosen_table(), team,
               check(norm, *qkv, qkv_bias, q_norm, k_norm, *o, o_bias, num_heads, num_kv_heads, head_dim),
               {num_heads, num_kv_heads, head_dim, eps, scale,
                sliding_window ? positive(*sliding_window, "AttentionBlock: sliding_window") : 0}) {}

  AttentionBlock& block() { return block_; }

  void forward(const py::array& hidden, AttentionBatch& batch, KvCache& cache, int layer) {
    float* rows = expect_writable_f32(view_of(hidden), "AttentionBlock.forward: hidden",
                                      {batch.num_tokens(), block_.hidden_size()});
    const py::gil_scoped_release release;
    block_.forward(rows, batch, cache, layer);
  }

 private:
  static AttentionWeights check(const py::array& norm, const PackedMatrix& qkv, const MaybeArray& qkv_bias,
                                const MaybeArray& q_norm, const MaybeArray& k_norm, const PackedMatrix& o,
                                const MaybeArray& o_bias, int num_heads, int num_kv_heads, int head_dim) {
    positive(head_dim, "AttentionBlock: head_dim");
    positive(num_kv_heads, "AttentionBlock: num_kv_heads");
    if (positive(num_heads, "AttentionBlock: num_heads") % num_kv_heads != 0) {
      throw KernelFailure("AttentionBlock: num_heads is " + std::to_string(num_heads) +
                          "; expected a multiple of num_kv_heads, which is " + std::to_string(num_kv_heads));
    }
    AttentionWeights w{};
    const int64_t rows = (static_cast<int64_t>(num_heads) + 2 * num_kv_heads) * head_dim;
    w.qkv = expect_packed(qkv, "AttentionBlock: qkv_weight", rows, kAny);
    const int64_t hidden = qkv.columns();
    w.o = expect_packed(o, "AttentionBlock: o_weight", hidden, static_cast<int64_t>(num_heads) * head_dim);
    w.norm = expect_f32(view_of(norm), "AttentionBlock: norm_weight", {hidden});
    w.qkv_bias = vector_or_null(qkv_bias, "AttentionBlock: qkv_bias", rows);
    w.q_norm = vector_or_null(q_norm, "AttentionBlock: q_norm", head_dim);
    w.k_norm = vector_or_null(k_norm, "AttentionBlock: k_norm", head_dim);
    w.o_bias = vector_or_null(o_bias, "AttentionBlock: o_bias", hidden);
    return w;
  }

  Arrays arrays_;
  Packed qkv_, o_;
  AttentionBlock block_;
};

class __attribute__((visibility("hidden"))) BoundRouter {
 public:
  BoundRouter(ThreadTeam& team, const py::array& norm, const py::array& gate, int top_k, bool norm_topk_prob,
              float eps, const std::string& scoring)
      : arrays_{norm, gate}, router_(make(team, norm, gate, top_k, norm_topk_prob, eps, scoring)) {}

  Router& router() { return router_; }

  void forward(const py::array& hidden, const py::array& normed, const py::array& ids,
               const py::array& weights, const MaybeArray& logits) {
    const TensorView view = view_of(hidden);
    const float* x = expect_f32(view, "Router.forward: hidden", {kAny, router_.hidden_size()});
    const int64_t T = view.shape[0];
    float* out = expect_writable_f32(view_of(normed), "Router.forward: normed", {T, router_.hidden_size()});
    int32_t* chosen = expect_writable_i32(view_of(ids), "Router.forward: ids", {T, router_.top_k()});
    float* shares = expect_writable_f32(view_of(weights), "Router.forward: weights", {T, router_.top_k()});
    float* scores =
        logits ? expect_writable_f32(view_of(*logits), "Router.forward: logits", {T, router_.num_experts()})
               : nullptr;
    const py::gil_scoped_release release;
    router_.forward(x, out, chosen, shares, scores, static_cast<int>(T));
  }

 private:
  static Router make(ThreadTeam& team, const py::array& norm, const py::array& gate, int top_k,
                     bool norm_topk_prob, float eps, const std::string& scoring) {
    if (scoring != "softmax")
      throw KernelFailure("Router: scoring is \"" + scoring + "\"; expected \"softmax\"");
    const Weight w = expect_weight(view_of(gate), "Router: gate_weight", kAny, kAny);
    if (top_k < 1 || top_k > w.rows) {
      throw KernelFailure("Router: top_k is " + std::to_string(top_k) +
                          "; expected 1 to the number of experts, " + std::to_string(w.rows));
    }
    const float* norm_weight = expect_f32(view_of(norm), "Router: norm_weight", {w.cols});
    return {chosen_table(), team, norm_weight, w, eps, top_k, norm_topk_prob};
  }

  Arrays arrays_;
  Router router_;
};

class __attribute__((visibility("hidden"))) BoundFfn {
 public:
  BoundFfn(ThreadTeam& team, const py::array& norm, const Packed& gate, const Packed& up, const Packed& down,
           float eps)
      : norm_(norm), gate_(gate), up_(up), down_(down), ffn_(make(team, norm, *gate, *up, *down, eps)) {}

  DenseFfn& ffn() { return ffn_; }

  void forward(const py::array& hidden) {
    const TensorView view = view_of(hidden);
    float* rows = expect_writable_f32(view, "DenseFfn.forward: hidden", {kAny, ffn_.hidden_size()});
    const py::gil_scoped_release release;
    ffn_.forward(rows, static_cast<int>(view.shape[0]));
  }

 private:
  static DenseFfn make(ThreadTeam& team, const py::array& norm, const PackedMatrix& gate,
                       const PackedMatrix& up, const PackedMatrix& down, float eps) {
    expect_packed(up, "DenseFfn: up", gate.rows(), gate.columns());
    expect_packed(down, "DenseFfn: down", gate.columns(), gate.rows());
    for (const PackedMatrix* matrix : {&gate, &up, &down}) {
      if (matrix->segments().size() != 1)
        throw KernelFailure("DenseFfn: a matrix is stacked; expected one part");
    }
    const float* norm_weight = expect_f32(view_of(norm), "DenseFfn: norm_weight", {gate.columns()});
    return {chosen_table(), team, norm_weight, gate, up, down, eps};
  }

  py::array norm_;
  Packed gate_, up_, down_;
  DenseFfn ffn_;
};

class __attribute__((visibility("hidden"))) BoundLmHead {
 public:
  BoundLmHead(ThreadTeam& team, const py::array& norm, const Packed& weight, float eps)
      : norm_(norm),
        weight_(weight),
        head_(chosen_table(), team, expect_f32(view_of(norm), "LmHead: norm_weight", {weight->columns()}),
              *weight, eps) {}

  void forward(const py::array& hidden_rows, const py::array& logits) {
    const TensorView view = view_of(hidden_rows);
    const float* rows = expect_f32(view, "LmHead.forward: hidden_rows", {kAny, head_.hidden_size()});
    float* out =
        expect_writable_f32(view_of(logits), "LmHead.forward: logits", {view.shape[0], head_.vocabulary()});
    const py::gil_scoped_release release;
    head_.forward(rows, out, static_cast<int>(view.shape[0]));
  }

 private:
  py::array norm_;
  Packed weight_;
  LmHead head_;
};

using LayerParts = std::tuple<BoundAttention*, BoundRouter*, BoundFfn*>;

class __attribute__((visibility("hidden"))) BoundDecoder {
 public:
  explicit BoundDecoder(const std::vector<py::tuple>& layers) : decoder_(make(layers)), layers_(layers) {}

  void forward(const py::array& hidden, AttentionBatch& batch, KvCache& cache, MoeExecutor& experts) {
    float* rows = expect_writable_f32(view_of(hidden), "Decoder.forward: hidden",
                                      {batch.num_tokens(), decoder_.hidden_size()});
    const py::gil_scoped_release release;
    decoder_.forward(rows, batch, cache, experts);
  }

 private:
  static Decoder make(const std::vector<py::tuple>& layers) {
    std::vector<DecoderLayer> parts;
    for (const py::tuple& layer : layers) {
      const auto [attention, router, dense] = layer.cast<LayerParts>();
      parts.push_back({attention == nullptr ? nullptr : &attention->block(),
                       router == nullptr ? nullptr : &router->router(),
                       dense == nullptr ? nullptr : &dense->ffn()});
    }
    try {
      return Decoder(std::move(parts));
    } catch (const std::invalid_argument& wrong) {
      throw KernelFailure(wrong.what());
    }
  }

  Decoder decoder_;
  std::vector<py::tuple> layers_;  // what its parts live in
};

void embed_tokens(ThreadTeam& team, const py::object& table, const py::array& token_ids,
                  const py::array& out) {
  const SourceMatrix weight = source_matrix(table, "embed: table");
  const TensorView ids = view_of(token_ids);
  const int32_t* tokens = expect_i32(ids, "embed: token_ids", {kAny});
  float* rows = expect_writable_f32(view_of(out), "embed: out", {ids.shape[0], weight.columns});
  const py::gil_scoped_release release;
  embed(team, weight, tokens, rows, static_cast<int>(ids.shape[0]));
}

}  // namespace

void bind_dense_ops(py::module_& m) {
  py::class_<PackedMatrix, Packed>(m, "PackedMatrix", "Matrices stacked by rows, in the kernels' panels.")
      .def(py::init(&pack), py::arg("team"), py::arg("parts"))
      .def_property_readonly("rows", &PackedMatrix::rows)
      .def_property_readonly("columns", &PackedMatrix::columns)
      .def_property_readonly("bytes", &PackedMatrix::bytes)
      .def_property_readonly("formats", &formats_of);
  m.def("embed", &embed_tokens, py::arg("team"), py::arg("table"), py::arg("token_ids"), py::arg("out"));
  py::class_<BoundAttention>(m, "AttentionBlock", "The attention half of a decoder layer.")
      .def(py::init<ThreadTeam&, const py::array&, const Packed&, const MaybeArray&, const MaybeArray&,
                    const MaybeArray&, const Packed&, const MaybeArray&, int, int, int, float, float,
                    std::optional<int>>(),
           py::keep_alive<1, 2>(), py::arg("team"), py::arg("norm_weight"), py::arg("qkv_weight"),
           py::arg("qkv_bias"), py::arg("q_norm"), py::arg("k_norm"), py::arg("o_weight"), py::arg("o_bias"),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("eps"),
           py::arg("scale"), py::arg("sliding_window"))
      .def("forward", &BoundAttention::forward, py::arg("hidden"), py::arg("batch"), py::arg("kv_cache"),
           py::arg("layer"));
  py::class_<BoundRouter>(m, "Router", "Norm, gate, softmax and top-k of an MoE layer.")
      .def(py::init<ThreadTeam&, const py::array&, const py::array&, int, bool, float, const std::string&>(),
           py::keep_alive<1, 2>(), py::arg("team"), py::arg("norm_weight"), py::arg("gate_weight"),
           py::arg("top_k"), py::arg("norm_topk_prob"), py::arg("eps"), py::arg("scoring") = "softmax")
      .def("forward", &BoundRouter::forward, py::arg("hidden"), py::arg("normed"), py::arg("ids"),
           py::arg("weights"), py::arg("logits") = py::none());
  py::class_<BoundFfn>(m, "DenseFfn", "The SiLU-gated feed-forward of a layer without experts.")
      .def(py::init<ThreadTeam&, const py::array&, const Packed&, const Packed&, const Packed&, float>(),
           py::keep_alive<1, 2>(), py::arg("team"), py::arg("norm_weight"), py::arg("gate"), py::arg("up"),
           py::arg("down"), py::arg("eps"))
      .def("forward", &BoundFfn::forward, py::arg("hidden"));
  py::class_<BoundDecoder>(m, "Decoder", "The layers of a model in one call.")
      .def(py::init<const std::vector<py::tuple>&>(), py::arg("layers"))
      .def("forward", &BoundDecoder::forward, py::arg("hidden"), py::arg("batch"), py::arg("kv_cache"),
           py::arg("experts"));
  py::class_<BoundLmHead>(m, "LmHead", "Final norm and output projection.")
      .def(py::init<ThreadTeam&, const py::array&, const Packed&, float>(), py::keep_alive<1, 2>(),
           py::arg("team"), py::arg("norm_weight"), py::arg("weight"), py::arg("eps"))
      .def("forward", &BoundLmHead::forward, py::arg("hidden_rows"), py::arg("logits"));
}

}  // namespace twofold::bindings
