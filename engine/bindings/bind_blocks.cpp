// Blocks and the decoder made of them. A block keeps alive what it was given, checks shapes once when made,
// and releases the GIL while it computes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind_ops.h"
#include "moe/blocks.h"
#include "moe/decoder.h"
#include "moe/moe_executor.h"
#include "ops/gqa_attention.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using MaybeArray = std::optional<py::array>;
using GqaBlock = AttentionBlock<GqaAttention>;

const float* vector_or_null(const MaybeArray& array, const char* what, int64_t size) {
  return array ? expect_f32(view_of(*array), what, {size}) : nullptr;
}

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

int positive(int value, const char* what) {
  if (value < 1)
    throw KernelFailure(std::string(what) + " is " + std::to_string(value) + "; expected at least 1");
  return value;
}

std::unique_ptr<GqaBlock> make_gqa(ThreadTeam& team, const py::array& norm, const PackedMatrix& qkv,
                                   const MaybeArray& qkv_bias, const MaybeArray& q_norm,
                                   const MaybeArray& k_norm, const PackedMatrix& o, const MaybeArray& o_bias,
                                   int num_heads, int num_kv_heads, int head_dim, float eps, float scale,
                                   std::optional<int> sliding_window, int layer) {
  positive(head_dim, "Gqa: head_dim");
  positive(num_kv_heads, "Gqa: num_kv_heads");
  if (positive(num_heads, "Gqa: num_heads") % num_kv_heads != 0) {
    throw KernelFailure("Gqa: num_heads is " + std::to_string(num_heads) +
                        "; expected a multiple of num_kv_heads, which is " + std::to_string(num_kv_heads));
  }
  GqaWeights w{};
  const int64_t rows = (static_cast<int64_t>(num_heads) + 2 * num_kv_heads) * head_dim;
  w.qkv = expect_packed(qkv, "Gqa: qkv_weight", rows, kAny);
  const int64_t hidden = qkv.columns();
  w.o = expect_packed(o, "Gqa: o_weight", hidden, static_cast<int64_t>(num_heads) * head_dim);
  w.norm = expect_f32(view_of(norm), "Gqa: norm_weight", {hidden});
  w.qkv_bias = vector_or_null(qkv_bias, "Gqa: qkv_bias", rows);
  w.q_norm = vector_or_null(q_norm, "Gqa: q_norm", head_dim);
  w.k_norm = vector_or_null(k_norm, "Gqa: k_norm", head_dim);
  w.o_bias = vector_or_null(o_bias, "Gqa: o_bias", hidden);
  const int window = sliding_window ? positive(*sliding_window, "Gqa: sliding_window") : 0;
  const GqaShape shape{num_heads, num_kv_heads, head_dim, eps, scale, window};
  return std::make_unique<GqaBlock>(GqaAttention(chosen_table(), team, w, shape), layer);
}

template <typename Attention>
void attend(AttentionBlock<Attention>& block, const py::array& hidden, AttentionBatch& batch,
            StateCache& cache) {
  float* rows =
      expect_writable_f32(view_of(hidden), "Gqa.forward: hidden", {batch.num_tokens(), block.hidden_size()});
  const py::gil_scoped_release release;
  block.forward(rows, batch, cache);
}

kernels::RouterShape make_shape(int top_k, const std::string& score, bool renormalise, float scale,
                                int num_groups, int top_groups, const std::string& group_score) {
  kernels::RouterShape shape;
  try {
    shape = {.top_k = top_k,
             .score = kernels::router_score_named(score),
             .num_groups = num_groups,
             .top_groups = top_groups,
             .group_score = kernels::group_score_named(group_score),
             .renormalise = renormalise,
             .scale = scale};
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(wrong.what());
  }
  return shape;
}

std::unique_ptr<RouterBlock> make_router(ThreadTeam& team, const py::array& norm, const py::array& gate,
                                         float eps, const kernels::RouterShape& shape,
                                         const MaybeArray& bias) {
  RouterWeights weights{};
  weights.gate = expect_weight(view_of(gate), "Router: gate_weight", kAny, kAny);
  weights.norm = expect_f32(view_of(norm), "Router: norm_weight", {weights.gate.cols});
  weights.bias = vector_or_null(bias, "Router: bias", weights.gate.rows);
  return std::make_unique<RouterBlock>(Router(chosen_table(), team, weights, eps, shape));
}

void route(RouterBlock& block, const py::array& hidden, const py::array& normed, const py::array& ids,
           const py::array& weights, const MaybeArray& logits) {
  Router& router = block.router();
  const TensorView view = view_of(hidden);
  const float* x = expect_f32(view, "Router.forward: hidden", {kAny, router.hidden_size()});
  const int64_t T = view.shape[0];
  float* out = expect_writable_f32(view_of(normed), "Router.forward: normed", {T, router.hidden_size()});
  int32_t* chosen = expect_writable_i32(view_of(ids), "Router.forward: ids", {T, router.top_k()});
  float* shares = expect_writable_f32(view_of(weights), "Router.forward: weights", {T, router.top_k()});
  float* scores =
      logits ? expect_writable_f32(view_of(*logits), "Router.forward: logits", {T, router.num_experts()})
             : nullptr;
  const py::gil_scoped_release release;
  router.forward(x, out, chosen, shares, scores, static_cast<int>(T));
}

GatedFfn make_ffn(ThreadTeam& team, const std::string& block, const PackedMatrix& gate,
                  const PackedMatrix& up, const PackedMatrix& down) {
  expect_packed(up, (block + ": up").c_str(), gate.rows(), gate.columns());
  expect_packed(down, (block + ": down").c_str(), gate.columns(), gate.rows());
  for (const PackedMatrix* matrix : {&gate, &up, &down}) {
    if (matrix->segments().size() != 1)
      throw KernelFailure(block + ": a matrix is stacked; expected one part");
  }
  return {chosen_table(), team, gate, up, down};
}

std::unique_ptr<DenseFfn> make_dense(ThreadTeam& team, const py::array& norm, const PackedMatrix& gate,
                                     const PackedMatrix& up, const PackedMatrix& down, float eps) {
  GatedFfn ffn = make_ffn(team, "DenseFfn", gate, up, down);
  const float* norm_weight = expect_f32(view_of(norm), "DenseFfn: norm_weight", {gate.columns()});
  return std::make_unique<DenseFfn>(std::move(ffn), norm_weight, eps);
}

std::unique_ptr<SharedExperts> make_shared_experts(ThreadTeam& team, const PackedMatrix& gate,
                                                   const PackedMatrix& up, const PackedMatrix& down,
                                                   const MaybeArray& shared_gate) {
  GatedFfn ffn = make_ffn(team, "SharedExperts", gate, up, down);
  const float* sigmoid = vector_or_null(shared_gate, "SharedExperts: shared_gate", gate.columns());
  return std::make_unique<SharedExperts>(chosen_table(), team, std::move(ffn), sigmoid);
}

class __attribute__((visibility("hidden"))) BoundDecoder {
 public:
  explicit BoundDecoder(const py::sequence& blocks) : blocks_(blocks), decoder_(make(blocks_)) {}

  void forward(const py::array& hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts) {
    float* rows = expect_writable_f32(view_of(hidden), "Decoder.forward: hidden",
                                      {batch.num_tokens(), decoder_.hidden_size()});
    const py::gil_scoped_release release;
    decoder_.forward(rows, batch, cache, experts);
  }

 private:
  static Decoder make(const py::tuple& blocks) {
    try {
      return Decoder(blocks.cast<std::vector<Block*>>());
    } catch (const std::invalid_argument& wrong) {
      throw KernelFailure(wrong.what());
    }
  }

  py::tuple blocks_;  // what the decoder points to
  Decoder decoder_;
};

}  // namespace

void bind_blocks(py::module_& m) {
  py::class_<Block>(m, "Block", "Part of a layer: adds to the residual stream.")
      .def_property_readonly("hidden_size", &Block::hidden_size);
  py::class_<GqaBlock, Block>(m, "Gqa", "Grouped-query attention.")
      .def(py::init(&make_gqa), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>(),
           py::keep_alive<1, 9>(), py::arg("team"), py::arg("norm_weight"), py::arg("qkv_weight"),
           py::arg("qkv_bias"), py::arg("q_norm"), py::arg("k_norm"), py::arg("o_weight"), py::arg("o_bias"),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("eps"),
           py::arg("scale"), py::arg("sliding_window"), py::arg("layer"))
      .def("forward", &attend<GqaAttention>, py::arg("hidden"), py::arg("batch"), py::arg("cache"));
  py::class_<kernels::RouterShape>(m, "RouterShape", "How a router turns logits into choice and weights.")
      .def(py::init(&make_shape), py::arg("top_k"), py::kw_only(), py::arg("score") = "softmax",
           py::arg("renormalise") = false, py::arg("scale") = 1.0F, py::arg("num_groups") = 1,
           py::arg("top_groups") = 1, py::arg("group_score") = "max");
  py::class_<RouterBlock, Block>(m, "Router", "Norm, gate, scores and top-k of an MoE layer.")
      .def(py::init(&make_router), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 7>(), py::arg("team"), py::arg("norm_weight"), py::arg("gate_weight"),
           py::arg("eps"), py::arg("shape"), py::arg("bias") = py::none())
      .def("forward", &route, py::arg("hidden"), py::arg("normed"), py::arg("ids"), py::arg("weights"),
           py::arg("logits") = py::none());
  py::class_<RoutedExperts, Block>(m, "RoutedExperts", "The experts that the router before it chose.")
      .def(py::init<int, int>(), py::arg("hidden_size"), py::arg("moe_layer"));
  py::class_<SharedExperts, Block>(m, "SharedExperts", "A feed-forward of the router's normed rows.")
      .def(py::init(&make_shared_experts), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::arg("team"),
           py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("shared_gate") = py::none())
      .def(
          "forward",
          [](SharedExperts& block, const py::array& hidden, const py::array& normed) {
            const TensorView view = view_of(hidden);
            const int64_t H = block.hidden_size();
            float* sum = expect_writable_f32(view, "SharedExperts.forward: hidden", {kAny, H});
            const float* x = expect_f32(view_of(normed), "SharedExperts.forward: normed", {view.shape[0], H});
            const py::gil_scoped_release release;
            block.forward(sum, x, static_cast<int>(view.shape[0]));
          },
          py::arg("hidden"), py::arg("normed"));
  py::class_<DenseFfn, Block>(m, "DenseFfn", "The SiLU-gated feed-forward of a layer without experts.")
      .def(py::init(&make_dense), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::arg("team"), py::arg("norm_weight"),
           py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("eps"))
      .def(
          "forward",
          [](DenseFfn& block, const py::array& hidden) {
            const TensorView view = view_of(hidden);
            float* rows = expect_writable_f32(view, "DenseFfn.forward: hidden", {kAny, block.hidden_size()});
            const py::gil_scoped_release release;
            block.forward(rows, static_cast<int>(view.shape[0]));
          },
          py::arg("hidden"));
  py::class_<BoundDecoder>(m, "Decoder", "The blocks of a model in one call.")
      .def(py::init<const py::sequence&>(), py::arg("blocks"))
      .def("forward", &BoundDecoder::forward, py::arg("hidden"), py::arg("batch"), py::arg("cache"),
           py::arg("experts").none(true));
}

}  // namespace twofold::bindings
