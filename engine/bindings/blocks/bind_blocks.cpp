// Blocks that compute each token by itself, and the decoder made of blocks.
#include "blocks/bind_blocks.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "moe/blocks.h"
#include "moe/decoder.h"
#include "moe/moe_executor.h"
#include "moe/ngram_input.h"
#include "ops/attention/attention_batch.h"
#include "ops/bind_ops.h"
#include "ops/state_cache.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

kernels::RouterShape make_shape(int top_k, const std::string& score, bool renormalise, float scale,
                                int num_groups, int top_groups, const std::string& group_score,
                                bool zero_others) {
  try {
    return {.top_k = top_k,
            .score = kernels::router_score_named(score),
            .num_groups = num_groups,
            .top_groups = top_groups,
            .group_score = kernels::group_score_named(group_score),
            .zero_others = zero_others,
            .renormalise = renormalise,
            .scale = scale};
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(wrong.what());
  }
}

std::shared_ptr<RouterBlock> make_router(BlockArguments given) {
  const Weight gate =
      expect_weight(given.array("gate_weight"), given.where("gate_weight").c_str(), kAny, kAny);
  const RouterWeights weights{
      .norm = given.optional_vector("norm_weight", gate.cols),
      .gate = gate,
      .bias = given.optional_vector("bias", gate.rows),
      .gate_bias = given.optional_vector("gate_bias", gate.rows),
      .gate_norm = given.optional_vector("gate_norm", gate.cols),
      .expert_scale = given.optional_vector("expert_scale", gate.rows),
      .softcap = given.value("softcap", 0.0f),
  };
  const auto eps = given.value<float>("eps");
  const auto shape = given.value<kernels::RouterShape>("shape");
  const auto made = [&](const RouterWeights& of) {
    return Router(given.pool().kernels(), given.pool(), of, eps, shape);
  };
  if (!given.has("pictures_gate")) return given.own(RouterBlock(made(weights)));
  RouterWeights of_pictures = weights;
  of_pictures.gate =
      expect_weight(given.array("pictures_gate"), given.where("pictures_gate").c_str(), gate.rows, gate.cols);
  of_pictures.bias = given.optional_vector("pictures_bias", gate.rows);
  return given.own(RouterBlock(made(weights), made(of_pictures)));
}

GatedFfn make_ffn(BlockArguments& given) {
  const PackedMatrix& gate = given.packed("gate", kAny, kAny);
  const PackedMatrix& up = given.packed("up", gate.rows(), gate.columns());
  const PackedMatrix& down = given.packed("down", gate.columns(), gate.rows());
  for (const PackedMatrix* matrix : {&gate, &up, &down}) {
    if (matrix->segments().size() != 1) throw given.failure("a matrix is stacked; expected one part");
  }
  try {
    return {given.pool().kernels(),
            given.pool(),
            gate,
            up,
            down,
            kernels::expert_activation_named(given.value<std::string>("activation", "silu")),
            given.value("limit", 0.0f)};
  } catch (const std::invalid_argument& wrong) {
    throw given.failure(wrong.what());
  }
}

std::shared_ptr<DenseFfn> make_dense(BlockArguments given) {
  GatedFfn ffn = make_ffn(given);
  const float* norm = given.vector("norm_weight", ffn.hidden_size());
  return given.own(DenseFfn(std::move(ffn), norm, given.value<float>("eps")));
}

std::shared_ptr<SharedExperts> make_shared_experts(BlockArguments given) {
  GatedFfn ffn = make_ffn(given);
  const float* sigmoid = given.optional_vector("shared_gate", ffn.hidden_size());
  return given.own(SharedExperts(given.pool().kernels(), given.pool(), std::move(ffn), sigmoid));
}

std::shared_ptr<MtpInput> make_mtp_input(BlockArguments given) {
  MtpInput::Parts parts;
  if (given.has("num_streams")) parts.num_streams = given.at_least(1, "num_streams");
  int64_t hidden = 0;
  if (given.has("of_hidden")) {
    parts.of_hidden = &given.packed("of_hidden", kAny, kAny);
    hidden = parts.of_hidden->rows();
    given.expect_size("of_hidden", *parts.of_hidden, hidden, hidden);
    parts.of_embedding = &given.packed("of_embedding", hidden, hidden);
  } else {
    parts.projection = &given.packed("projection", kAny, kAny);
    hidden = parts.projection->rows();
    given.expect_size("projection", *parts.projection, hidden, 2 * hidden);
  }
  parts.embedding_norm = given.vector("embedding_norm", hidden);
  parts.hidden_norm = given.vector("hidden_norm", parts.num_streams * hidden);
  parts.eps = given.value<float>("eps");
  return given.own(MtpInput(given.pool().kernels(), given.pool(), parts));
}

std::shared_ptr<LayerInput> make_layer_input(BlockArguments given) {
  const PackedMatrix& gate = given.packed("gate", kAny, kAny);
  const PackedMatrix& projection = given.packed("projection", gate.columns(), gate.rows());
  return given.own(
      LayerInput(given.pool().kernels(), given.pool(), gate, projection, given.at_least(0, "first")));
}

std::shared_ptr<NgramInput> make_ngram_input(BlockArguments given) {
  const PackedMatrix& key = given.packed("key", kAny, kAny);
  const PackedMatrix& value = given.packed("value", kAny, key.columns());
  if (key.rows() % value.rows() != 0) {
    throw given.failure("key has " + std::to_string(key.rows()) + " rows; expected a multiple of value's " +
                        std::to_string(value.rows()));
  }
  const TensorView conv = given.array("conv");
  const float* taps = expect_f32(conv, given.where("conv").c_str(), {kAny, key.rows()});
  if (conv.shape[0] < 1) throw given.failure("conv has no taps; expected at least 1");
  const NgramInputParts parts{
      .key = &key,
      .value = &value,
      .key_norm = given.vector("key_norm", key.rows()),
      .query_norm = given.vector("query_norm", key.rows()),
      .conv_norm = given.vector("conv_norm", key.rows()),
      .conv = {taps, static_cast<int>(conv.shape[0]), static_cast<int>(key.rows()),
               given.at_least(1, "dilation")},
      .eps = given.value<float>("eps"),
      .first = given.at_least(0, "first"),
      .place = {given.value<int>("layer"), given.value<int64_t>("record_at", 0)},
  };
  return given.own(NgramInput(given.pool().kernels(), given.pool(), parts));
}

class __attribute__((visibility("hidden"))) BoundDecoder {
 public:
  BoundDecoder(const py::sequence& blocks, const PoolView* pool, std::vector<int> threads)
      : blocks_(blocks),
        pool_(pool == nullptr ? std::nullopt : std::optional<PoolView>(*pool)),
        decoder_(make(blocks_, pool, std::move(threads))) {}

  void forward(const py::array& hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts,
               const std::optional<py::array>& previous, const std::optional<py::array>& layer_inputs) {
    float* rows = expect_writable_f32(view_of(hidden), "Decoder.forward: hidden",
                                      {batch.num_tokens(), decoder_.hidden_size()});
    const float* before = nullptr;
    if (previous) {
      before = expect_f32(view_of(*previous), "Decoder.forward: previous",
                          {batch.num_tokens(), int64_t{decoder_.num_streams()} * decoder_.hidden_size()});
    }
    LayerInputRows inputs;
    if (layer_inputs) {
      const TensorView view = view_of(*layer_inputs);
      inputs.rows = expect_f32(view, "Decoder.forward: layer_inputs", {batch.num_tokens(), kAny});
      inputs.width = view.shape[1];
    }
    const py::gil_scoped_release release;
    decoder_.forward(rows, batch, cache, experts, before, inputs);
  }

  py::array streams() const {
    const std::span<const float> all = decoder_.streams();
    const int64_t width = int64_t{decoder_.num_streams()} * decoder_.hidden_size();
    return py::array_t<float>({static_cast<int64_t>(all.size()) / width, width}, all.data());
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

  // What the decoder points to.
  py::tuple blocks_;
  std::optional<PoolView> pool_;
  Decoder decoder_;
};

}  // namespace

void bind_blocks(py::module_& m) {
  py::class_<Block, std::shared_ptr<Block>>(m, "Block", "Part of a layer: adds to the residual stream.")
      .def_property_readonly("hidden_size", &Block::hidden_size);
  bind_attention(m);
  py::class_<kernels::RouterShape>(m, "RouterShape", "How a router turns logits into choice and weights.")
      .def(py::init(&make_shape), py::arg("top_k"), py::kw_only(), py::arg("score") = "softmax",
           py::arg("renormalise") = false, py::arg("scale") = 1.0F, py::arg("num_groups") = 1,
           py::arg("top_groups") = 1, py::arg("group_score") = "max", py::arg("zero_others") = false);
  bind_block<RouterBlock>(m, "Router", "Norm, gate, scores and top-k of an MoE layer.", &make_router);
  py::class_<RoutedExperts, Block, std::shared_ptr<RoutedExperts>>(
      m, "RoutedExperts", "The experts that the router before it chose.")
      .def(py::init<int, int, bool>(), py::arg("hidden_size"), py::arg("moe_layer"),
           py::arg("weighs_rows") = false);
  bind_block<SharedExperts>(m, "SharedExperts", "A feed-forward of the router's normed rows.",
                            &make_shared_experts);
  bind_block<DenseFfn>(m, "DenseFfn", "A gated feed-forward with a norm of its own.", &make_dense);
  bind_block<MtpInput>(m, "MtpInput", "Joins embeddings and hidden states for an MTP layer.",
                       &make_mtp_input);
  bind_block<LayerInput>(m, "LayerInput", "Adds the layer's own input, gated by the hidden state.",
                         &make_layer_input);
  bind_block<NgramInput>(m, "NgramInput", "Adds gated embeddings of n-grams to every residual stream.",
                         &make_ngram_input);
  bind_residuals(m);
  py::class_<BoundDecoder>(m, "Decoder", "The blocks of a model in one call.")
      .def(py::init<const py::sequence&, const PoolView*, std::vector<int>>(), py::arg("blocks"),
           py::arg("pool") = py::none(), py::arg("threads") = std::vector<int>())
      .def("forward", &BoundDecoder::forward, py::arg("hidden"), py::arg("batch"), py::arg("cache"),
           py::arg("experts") = py::none(), py::arg("previous") = std::nullopt,
           py::arg("layer_inputs") = std::nullopt)
      .def_property_readonly("streams", &BoundDecoder::streams,
                             "Several streams of the last forward pass, f32 [T, streams * hidden size].");
}

}  // namespace twofold::bindings
