// Blocks and the decoder made of them. A block keeps its arguments alive, checks shapes once when made, and
// releases the GIL while it computes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "moe/blocks.h"
#include "moe/decoder.h"
#include "moe/moe_executor.h"
#include "ops/attention/gqa.h"
#include "ops/attention/mla.h"
#include "ops/bind_ops.h"
#include "ops/recurrent/gated_delta.h"
#include "ops/recurrent/short_convolution.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using MaybeArray = std::optional<py::array>;
using GqaBlock = AttentionBlock<GqaAttention>;
using MlaBlock = AttentionBlock<MlaAttention>;
using GatedDeltaBlock = AttentionBlock<GatedDeltaNet>;
using ConvolutionBlock = AttentionBlock<ShortConvolution>;

const float* vector_or_null(const MaybeArray& array, const char* what, int64_t size) {
  return array ? expect_f32(view_of(*array), what, {size}) : nullptr;
}

// Throws for another shape; kAny: any.
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

std::unique_ptr<GqaBlock> make_gqa(const PoolView& pool, const py::array& norm, const PackedMatrix& qkv,
                                   const MaybeArray& qkv_bias, const MaybeArray& q_norm,
                                   const MaybeArray& k_norm, const PackedMatrix& o, const MaybeArray& o_bias,
                                   int num_heads, int num_kv_heads, int head_dim, float eps, float scale,
                                   std::optional<int> sliding_window, int layer, bool flat_norms,
                                   std::optional<int> chunk, bool rotated, bool neighbours, float period,
                                   float slope, bool gated, const MaybeArray& sinks, const MaybeArray& v_norm,
                                   bool keys_are_values, int rotation) {
  positive(head_dim, "Gqa: head_dim");
  positive(num_kv_heads, "Gqa: num_kv_heads");
  if (positive(num_heads, "Gqa: num_heads") % num_kv_heads != 0) {
    throw KernelFailure("Gqa: num_heads is " + std::to_string(num_heads) +
                        "; expected a multiple of num_kv_heads, which is " + std::to_string(num_kv_heads));
  }
  GqaWeights w{};
  const int64_t rows =
      ((gated ? 2 : 1) * static_cast<int64_t>(num_heads) + (keys_are_values ? 1 : 2) * num_kv_heads) *
      head_dim;
  if (gated && flat_norms) throw KernelFailure("Gqa: gated and flat_norms are given; expected one of them");
  w.qkv = expect_packed(qkv, "Gqa: qkv_weight", rows, kAny);
  const int64_t hidden = qkv.columns();
  w.o = expect_packed(o, "Gqa: o_weight", hidden, static_cast<int64_t>(num_heads) * head_dim);
  w.norm = expect_f32(view_of(norm), "Gqa: norm_weight", {hidden});
  w.qkv_bias = vector_or_null(qkv_bias, "Gqa: qkv_bias", rows);
  if (flat_norms && (!q_norm || !k_norm))
    throw KernelFailure("Gqa: flat_norms is given without q_norm and k_norm; expected all or none");
  w.q_norm = vector_or_null(q_norm, "Gqa: q_norm", int64_t{flat_norms ? num_heads : 1} * head_dim);
  w.k_norm = vector_or_null(k_norm, "Gqa: k_norm", int64_t{flat_norms ? num_kv_heads : 1} * head_dim);
  w.v_norm = vector_or_null(v_norm, "Gqa: v_norm", head_dim);
  w.o_bias = vector_or_null(o_bias, "Gqa: o_bias", hidden);
  if (rotation < 0)
    throw KernelFailure("Gqa: rotation is " + std::to_string(rotation) + "; expected at least 0");
  w.sinks = vector_or_null(sinks, "Gqa: sinks", num_heads);
  const AttentionWindow window{sliding_window ? positive(*sliding_window, "Gqa: sliding_window") : 0,
                               chunk ? positive(*chunk, "Gqa: chunk") : 0};
  const GqaShape shape{num_heads, num_kv_heads, head_dim, eps,   scale, window,          flat_norms,
                       rotated,   neighbours,   period,   slope, gated, keys_are_values, rotation};
  return std::make_unique<GqaBlock>(GqaAttention(pool.kernels(), pool, w, shape), layer);
}

// A matrix of `heads` parts of [rows, columns] each.
const PackedMatrix* expect_heads(const PackedMatrix& matrix, const std::string& what, int heads, int64_t rows,
                                 int64_t columns) {
  expect_packed(matrix, what.c_str(), heads * rows, columns);
  const auto& parts = matrix.segments();
  if (parts.size() != static_cast<size_t>(heads) ||
      std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return part.rows != rows; })) {
    throw KernelFailure(what + " has " + std::to_string(parts.size()) + " parts; expected one of " +
                        std::to_string(rows) + " rows for each of " + std::to_string(heads) + " heads");
  }
  return &matrix;
}

std::unique_ptr<MlaBlock> make_mla(const PoolView& pool, const py::array& norm, const PackedMatrix& a,
                                   const MaybeArray& a_bias, const MaybeArray& q_norm,
                                   const PackedMatrix* q_b, const py::array& latent_norm,
                                   const PackedMatrix& k_b, const PackedMatrix& v_b, const PackedMatrix& o,
                                   const MaybeArray& o_bias, int num_heads, int nope, int rope, float eps,
                                   float latent_eps, float scale, bool neighbours, int layer) {
  positive(num_heads, "Mla: num_heads");
  positive(nope, "Mla: nope_dim");
  if (positive(rope, "Mla: rope_dim") % 2 != 0)
    throw KernelFailure("Mla: rope_dim is " + std::to_string(rope) + "; expected an even number");
  const int64_t latent = v_b.columns(), value = v_b.rows() / num_heads, hidden = a.columns();
  const int64_t queries = static_cast<int64_t>(num_heads) * (nope + rope);
  const int64_t q_rows = q_b != nullptr ? q_b->columns() : queries;
  MlaWeights w{};
  w.norm = expect_f32(view_of(norm), "Mla: norm_weight", {hidden});
  w.a = expect_packed(a, "Mla: a_weight", q_rows + latent + rope, kAny);
  w.a_bias = vector_or_null(a_bias, "Mla: a_bias", a.rows());
  if (q_b != nullptr) {
    w.q_b = expect_packed(*q_b, "Mla: q_b_weight", queries, kAny);
    if (!q_norm) throw KernelFailure("Mla: q_b_weight is given without q_norm; expected both or none");
    w.q_norm = expect_f32(view_of(*q_norm), "Mla: q_norm", {q_rows});
  }
  w.latent_norm = expect_f32(view_of(latent_norm), "Mla: latent_norm", {latent});
  w.k_b = expect_heads(k_b, "Mla: k_b_weight", num_heads, latent, nope);
  w.v_b = expect_heads(v_b, "Mla: v_b_weight", num_heads, value, latent);
  w.o = expect_packed(o, "Mla: o_weight", hidden, num_heads * value);
  w.o_bias = vector_or_null(o_bias, "Mla: o_bias", hidden);
  const MlaShape shape{.num_heads = num_heads,
                       .nope = nope,
                       .rope = rope,
                       .latent = static_cast<int>(latent),
                       .value = static_cast<int>(value),
                       .eps = eps,
                       .latent_eps = latent_eps,
                       .scale = scale,
                       .neighbours = neighbours};
  return std::make_unique<MlaBlock>(MlaAttention(pool.kernels(), pool, w, shape), layer);
}

std::unique_ptr<GatedDeltaBlock> make_gated_delta(const PoolView& pool, const py::array& norm,
                                                  const PackedMatrix& in, const py::array& conv,
                                                  const py::array& decay_rate, const py::array& decay_bias,
                                                  const py::array& head_norm, const PackedMatrix& out,
                                                  int num_k_heads, int num_v_heads, int key_dim, float eps,
                                                  bool tiled, bool grouped, bool grouped_gates, int layer) {
  positive(key_dim, "GatedDelta: key_dim");
  if (positive(num_v_heads, "GatedDelta: num_v_heads") % positive(num_k_heads, "GatedDelta: num_k_heads") !=
      0) {
    throw KernelFailure("GatedDelta: num_v_heads is " + std::to_string(num_v_heads) +
                        "; expected a multiple of num_k_heads, which is " + std::to_string(num_k_heads));
  }
  const TensorView head = view_of(head_norm), taps = view_of(conv);
  GatedDeltaWeights w{};
  w.head_norm = expect_f32(head, "GatedDelta: head_norm", {kAny});
  GatedDeltaShape shape{.num_k_heads = num_k_heads,
                        .num_v_heads = num_v_heads,
                        .key_dim = key_dim,
                        .value_dim = positive(static_cast<int>(head.shape[0]), "GatedDelta: value_dim"),
                        .taps = 0,
                        .eps = eps,
                        .tiled = tiled,
                        .grouped = grouped,
                        .grouped_gates = grouped_gates};
  w.conv = expect_f32(taps, "GatedDelta: conv", {kAny, shape.channels()});
  shape.taps = static_cast<int>(taps.shape[0]);
  if (shape.taps < 2)
    throw KernelFailure("GatedDelta: conv has " + std::to_string(shape.taps) + " taps; expected at least 2");
  if (tiled && (grouped || grouped_gates))
    throw KernelFailure("GatedDelta: tiled and grouped are given; expected one of them");
  w.in = expect_packed(in, "GatedDelta: in_weight", shape.inputs(), kAny);
  w.out = expect_packed(out, "GatedDelta: out_weight", in.columns(), shape.values());
  w.norm = expect_f32(view_of(norm), "GatedDelta: norm_weight", {in.columns()});
  w.decay_rate = expect_f32(view_of(decay_rate), "GatedDelta: decay_rate", {num_v_heads});
  w.decay_bias = expect_f32(view_of(decay_bias), "GatedDelta: decay_bias", {num_v_heads});
  return std::make_unique<GatedDeltaBlock>(GatedDeltaNet(pool.kernels(), pool, w, shape), layer);
}

std::unique_ptr<ConvolutionBlock> make_convolution(const PoolView& pool, const py::array& norm,
                                                   const PackedMatrix& in, const MaybeArray& in_bias,
                                                   const py::array& conv, const MaybeArray& conv_bias,
                                                   const PackedMatrix& out, const MaybeArray& out_bias,
                                                   float eps, int layer) {
  const int64_t hidden = in.columns();
  const TensorView taps = view_of(conv);
  ShortConvolutionWeights w{};
  w.norm = expect_f32(view_of(norm), "ShortConvolution: norm_weight", {hidden});
  w.in = expect_packed(in, "ShortConvolution: in_weight", 3 * hidden, hidden);
  w.in_bias = vector_or_null(in_bias, "ShortConvolution: in_bias", 3 * hidden);
  w.conv = expect_f32(taps, "ShortConvolution: conv", {kAny, hidden});
  w.conv_bias = vector_or_null(conv_bias, "ShortConvolution: conv_bias", hidden);
  w.out = expect_packed(out, "ShortConvolution: out_weight", hidden, hidden);
  w.out_bias = vector_or_null(out_bias, "ShortConvolution: out_bias", hidden);
  const int count = static_cast<int>(taps.shape[0]);
  if (count < 2)
    throw KernelFailure("ShortConvolution: conv has " + std::to_string(count) + " taps; expected at least 2");
  return std::make_unique<ConvolutionBlock>(ShortConvolution(pool.kernels(), pool, w, count, eps), layer);
}

template <typename Attention>
void attend(AttentionBlock<Attention>& block, const py::array& hidden, AttentionBatch& batch,
            StateCache& cache) {
  float* rows = expect_writable_f32(view_of(hidden), "Block.forward: hidden",
                                    {batch.num_tokens(), block.hidden_size()});
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

std::unique_ptr<RouterBlock> make_router(const PoolView& pool, const py::array& norm, const py::array& gate,
                                         float eps, const kernels::RouterShape& shape, const MaybeArray& bias,
                                         const MaybeArray& gate_bias, const MaybeArray& gate_norm,
                                         const MaybeArray& expert_scale) {
  RouterWeights weights{};
  weights.gate = expect_weight(view_of(gate), "Router: gate_weight", kAny, kAny);
  weights.norm = expect_f32(view_of(norm), "Router: norm_weight", {weights.gate.cols});
  weights.bias = vector_or_null(bias, "Router: bias", weights.gate.rows);
  weights.gate_bias = vector_or_null(gate_bias, "Router: gate_bias", weights.gate.rows);
  weights.gate_norm = vector_or_null(gate_norm, "Router: gate_norm", weights.gate.cols);
  weights.expert_scale = vector_or_null(expert_scale, "Router: expert_scale", weights.gate.rows);
  return std::make_unique<RouterBlock>(Router(pool.kernels(), pool, weights, eps, shape));
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

GatedFfn make_ffn(const PoolView& pool, const std::string& block, const PackedMatrix& gate,
                  const PackedMatrix& up, const PackedMatrix& down, const std::string& activation = "silu") {
  expect_packed(up, (block + ": up").c_str(), gate.rows(), gate.columns());
  expect_packed(down, (block + ": down").c_str(), gate.columns(), gate.rows());
  for (const PackedMatrix* matrix : {&gate, &up, &down}) {
    if (matrix->segments().size() != 1)
      throw KernelFailure(block + ": a matrix is stacked; expected one part");
  }
  try {
    return {pool.kernels(), pool, gate, up, down, kernels::expert_activation_named(activation)};
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(block + ": " + wrong.what());
  }
}

std::unique_ptr<DenseFfn> make_dense(const PoolView& pool, const py::array& norm, const PackedMatrix& gate,
                                     const PackedMatrix& up, const PackedMatrix& down, float eps,
                                     const std::string& activation) {
  GatedFfn ffn = make_ffn(pool, "DenseFfn", gate, up, down, activation);
  const float* norm_weight = expect_f32(view_of(norm), "DenseFfn: norm_weight", {gate.columns()});
  return std::make_unique<DenseFfn>(std::move(ffn), norm_weight, eps);
}

std::unique_ptr<PostNorm> make_post_norm(const PoolView& pool, const py::array& norm, float eps, int over,
                                         float scale) {
  const TensorView view = view_of(norm);
  const float* weight = expect_f32(view, "PostNorm: norm_weight", {kAny});
  return std::make_unique<PostNorm>(pool.kernels(), pool, weight, static_cast<int>(view.shape[0]), eps,
                                    positive(over, "PostNorm: over"), scale);
}

std::unique_ptr<SharedExperts> make_shared_experts(const PoolView& pool, const PackedMatrix& gate,
                                                   const PackedMatrix& up, const PackedMatrix& down,
                                                   const MaybeArray& shared_gate) {
  GatedFfn ffn = make_ffn(pool, "SharedExperts", gate, up, down);
  const float* sigmoid = vector_or_null(shared_gate, "SharedExperts: shared_gate", gate.columns());
  return std::make_unique<SharedExperts>(pool.kernels(), pool, std::move(ffn), sigmoid);
}

class __attribute__((visibility("hidden"))) BoundDecoder {
 public:
  BoundDecoder(const py::sequence& blocks, const PoolView* pool, std::vector<int> threads)
      : blocks_(blocks), decoder_(make(blocks_, pool, std::move(threads))) {}

  void forward(const py::array& hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts) {
    float* rows = expect_writable_f32(view_of(hidden), "Decoder.forward: hidden",
                                      {batch.num_tokens(), decoder_.hidden_size()});
    const py::gil_scoped_release release;
    decoder_.forward(rows, batch, cache, experts);
  }

 private:
  static Decoder make(const py::tuple& blocks, const PoolView* pool, std::vector<int> threads) {
    try {
      return Decoder(blocks.cast<std::vector<Block*>>(), pool == nullptr ? nullptr : &pool->threads(),
                     std::move(threads));
    } catch (const std::invalid_argument& wrong) {
      throw KernelFailure(wrong.what());
    }
  }

  py::tuple blocks_;  // keeps alive what the decoder points to
  Decoder decoder_;
};

}  // namespace

void bind_blocks(py::module_& m) {
  py::class_<Block>(m, "Block", "Part of a layer: adds to the residual stream.")
      .def_property_readonly("hidden_size", &Block::hidden_size);
  py::class_<GqaBlock, Block>(m, "Gqa", "Grouped-query attention.")
      .def(py::init(&make_gqa), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>(),
           py::keep_alive<1, 9>(), py::keep_alive<1, 24>(), py::keep_alive<1, 25>(), py::arg("pool"),
           py::arg("norm_weight"), py::arg("qkv_weight"), py::arg("qkv_bias"), py::arg("q_norm"),
           py::arg("k_norm"), py::arg("o_weight"), py::arg("o_bias"), py::arg("num_heads"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("eps"), py::arg("scale"),
           py::arg("sliding_window"), py::arg("layer"), py::arg("flat_norms") = false,
           py::arg("chunk") = py::none(), py::arg("rotated") = true, py::arg("neighbours") = false,
           py::arg("period") = 0.0f, py::arg("slope") = 0.0f, py::arg("gated") = false,
           py::arg("sinks") = py::none(), py::arg("v_norm") = py::none(), py::arg("keys_are_values") = false,
           py::arg("rotation") = 0)
      .def("forward", &attend<GqaAttention>, py::arg("hidden"), py::arg("batch"), py::arg("cache"));
  py::class_<MlaBlock, Block>(m, "Mla", "Multi-head latent attention.")
      .def(py::init(&make_mla), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>(),
           py::keep_alive<1, 9>(), py::keep_alive<1, 10>(), py::keep_alive<1, 11>(), py::keep_alive<1, 12>(),
           py::arg("pool"), py::arg("norm_weight"), py::arg("a_weight"), py::arg("a_bias"), py::arg("q_norm"),
           py::arg("q_b_weight").none(true), py::arg("latent_norm"), py::arg("k_b_weight"),
           py::arg("v_b_weight"), py::arg("o_weight"), py::arg("o_bias"), py::kw_only(), py::arg("num_heads"),
           py::arg("nope_dim"), py::arg("rope_dim"), py::arg("eps"), py::arg("latent_eps"), py::arg("scale"),
           py::arg("neighbours"), py::arg("layer"))
      .def("forward", &attend<MlaAttention>, py::arg("hidden"), py::arg("batch"), py::arg("cache"));
  py::class_<GatedDeltaBlock, Block>(m, "GatedDelta", "A gated delta net.")
      .def(py::init(&make_gated_delta), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(),
           py::keep_alive<1, 8>(), py::keep_alive<1, 9>(), py::arg("pool"), py::arg("norm_weight"),
           py::arg("in_weight"), py::arg("conv"), py::arg("decay_rate"), py::arg("decay_bias"),
           py::arg("head_norm"), py::arg("out_weight"), py::kw_only(), py::arg("num_k_heads"),
           py::arg("num_v_heads"), py::arg("key_dim"), py::arg("eps"), py::arg("tiled"), py::arg("grouped"),
           py::arg("grouped_gates"), py::arg("layer"))
      .def_static(
          "record_bytes",
          [](int num_k_heads, int num_v_heads, int key_dim, int value_dim, int taps) {
            const GatedDeltaShape shape{.num_k_heads = positive(num_k_heads, "GatedDelta: num_k_heads"),
                                        .num_v_heads = num_v_heads,
                                        .key_dim = key_dim,
                                        .value_dim = value_dim,
                                        .taps = taps,
                                        .eps = 0,
                                        .tiled = false,
                                        .grouped = false,
                                        .grouped_gates = false};
            return shape.record_bytes();
          },
          py::arg("num_k_heads"), py::arg("num_v_heads"), py::arg("key_dim"), py::arg("value_dim"),
          py::arg("taps"))
      .def("forward", &attend<GatedDeltaNet>, py::arg("hidden"), py::arg("batch"), py::arg("cache"));
  py::class_<ConvolutionBlock, Block>(m, "ShortConvolution", "A gated short convolution.")
      .def(py::init(&make_convolution), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>(),
           py::keep_alive<1, 8>(), py::keep_alive<1, 9>(), py::arg("pool"), py::arg("norm_weight"),
           py::arg("in_weight"), py::arg("in_bias"), py::arg("conv"), py::arg("conv_bias"),
           py::arg("out_weight"), py::arg("out_bias"), py::arg("eps"), py::arg("layer"))
      .def("forward", &attend<ShortConvolution>, py::arg("hidden"), py::arg("batch"), py::arg("cache"));
  py::class_<kernels::RouterShape>(m, "RouterShape", "How a router turns logits into choice and weights.")
      .def(py::init(&make_shape), py::arg("top_k"), py::kw_only(), py::arg("score") = "softmax",
           py::arg("renormalise") = false, py::arg("scale") = 1.0F, py::arg("num_groups") = 1,
           py::arg("top_groups") = 1, py::arg("group_score") = "max");
  py::class_<RouterBlock, Block>(m, "Router", "Norm, gate, scores and top-k of an MoE layer.")
      .def(py::init(&make_router), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 7>(), py::keep_alive<1, 8>(), py::keep_alive<1, 9>(), py::keep_alive<1, 10>(),
           py::arg("pool"), py::arg("norm_weight"), py::arg("gate_weight"), py::arg("eps"), py::arg("shape"),
           py::arg("bias") = py::none(), py::arg("gate_bias") = py::none(), py::arg("gate_norm") = py::none(),
           py::arg("expert_scale") = py::none())
      .def("forward", &route, py::arg("hidden"), py::arg("normed"), py::arg("ids"), py::arg("weights"),
           py::arg("logits") = py::none());
  py::class_<RoutedExperts, Block>(m, "RoutedExperts", "The experts that the router before it chose.")
      .def(py::init<int, int, bool>(), py::arg("hidden_size"), py::arg("moe_layer"),
           py::arg("weighs_rows") = false);
  py::class_<SharedExperts, Block>(m, "SharedExperts", "A feed-forward of the router's normed rows.")
      .def(py::init(&make_shared_experts), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::arg("pool"),
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
  py::class_<DenseFfn, Block>(m, "DenseFfn", "A gated feed-forward with a norm of its own.")
      .def(py::init(&make_dense), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::arg("pool"), py::arg("norm_weight"),
           py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("eps"), py::arg("activation") = "silu")
      .def(
          "forward",
          [](DenseFfn& block, const py::array& hidden) {
            const TensorView view = view_of(hidden);
            float* rows = expect_writable_f32(view, "DenseFfn.forward: hidden", {kAny, block.hidden_size()});
            const py::gil_scoped_release release;
            block.forward(rows, rows, static_cast<int>(view.shape[0]));
          },
          py::arg("hidden"));
  py::class_<PostNorm, Block>(m, "PostNorm", "Norms what the blocks before it add.")
      .def(py::init(&make_post_norm), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::arg("pool"),
           py::arg("norm_weight"), py::arg("eps"), py::arg("over"), py::arg("scale") = 1.0f);
  py::class_<BoundDecoder>(m, "Decoder", "The blocks of a model in one call.")
      .def(py::init<const py::sequence&, const PoolView*, std::vector<int>>(), py::keep_alive<1, 3>(),
           py::arg("blocks"), py::arg("pool") = py::none(), py::arg("threads") = std::vector<int>())
      .def("forward", &BoundDecoder::forward, py::arg("hidden"), py::arg("batch"), py::arg("cache"),
           py::arg("experts").none(true));
}

}  // namespace twofold::bindings
