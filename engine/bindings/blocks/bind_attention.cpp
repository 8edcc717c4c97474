// Blocks that mix tokens of a sequence: attention kinds, gated delta nets, short convolutions.
#include <memory>
#include <string>
#include <utility>

#include "blocks/bind_blocks.h"
#include "blocks/block_arguments.h"
#include "moe/blocks.h"
#include "ops/attention/gqa.h"
#include "ops/attention/mla.h"
#include "ops/recurrent/gated_delta.h"
#include "ops/recurrent/short_convolution.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using GqaBlock = AttentionBlock<GqaAttention>;
using MlaBlock = AttentionBlock<MlaAttention>;
using GatedDeltaBlock = AttentionBlock<GatedDeltaNet>;
using ConvolutionBlock = AttentionBlock<ShortConvolution>;

// Throws unless `whole` is a multiple of `part`.
void expect_multiple(const BlockArguments& given, const char* whole_name, int whole, const char* part_name,
                     int part) {
  if (whole % part == 0) return;
  throw given.failure(whole_name + (" is " + std::to_string(whole)) + "; expected a multiple of " +
                      part_name + ", which is " + std::to_string(part));
}

int expect_taps(const BlockArguments& given, const TensorView& conv) {
  const int taps = static_cast<int>(conv.shape[0]);
  if (taps < 2) throw given.failure("conv has " + std::to_string(taps) + " taps; expected at least 2");
  return taps;
}

Temperature temperature_of(BlockArguments& given) {
  return {.period = given.value("period", 0.0f),
          .slope = given.value("slope", 0.0f),
          .shift = given.has("shift") ? given.at_least(0, "shift") : 1};
}

GqaShape gqa_shape(BlockArguments& given) {
  const float eps = given.value<float>("eps");
  const int head_dim = given.at_least(1, "head_dim");
  const GqaShape shape{
      .num_heads = given.at_least(1, "num_heads"),
      .num_kv_heads = given.at_least(1, "num_kv_heads"),
      .head_dim = head_dim,
      .value_dim = given.has("value_dim") ? given.at_least(1, "value_dim") : head_dim,
      .eps = eps,
      .scale = given.value<float>("scale"),
      .window = {.size = given.positive_or_zero("sliding_window"), .chunk = given.positive_or_zero("chunk")},
      .flat_norms = given.value("flat_norms", false),
      .rotated = given.value("rotated", true),
      .neighbours = given.value("neighbours", false),
      .temperature = temperature_of(given),
      .gated = given.value("gated", false),
      .gate_rows = given.has("gate_rows") ? given.at_least(0, "gate_rows") : 0,
      .softplus = given.value("softplus", false),
      .value_scale = given.value("value_scale", 1.0f),
      .keys_are_values = given.value("keys_are_values", false),
      .shares_kv = given.value("shares_kv", false),
      .rotation = given.has("rotation") ? given.at_least(0, "rotation") : 0,
      .head_eps = given.value("head_eps", eps),
  };
  expect_multiple(given, "num_heads", shape.num_heads, "num_kv_heads", shape.num_kv_heads);
  if (shape.gated && shape.flat_norms)
    throw given.failure("gated and flat_norms are given; expected one of them");
  if (shape.gate_rows > 0 && (shape.gated || (shape.gate_rows != 1 && shape.gate_rows != shape.value_dim)))
    throw given.failure("gate_rows is " + std::to_string(shape.gate_rows) +
                        "; expected 1 or value_dim, without gated");
  if (shape.value_dim != head_dim && (shape.keys_are_values || shape.gated))
    throw given.failure("value_dim is given with keys_are_values or gated; expected one of them");
  if (shape.flat_norms && (!given.has("q_norm") || !given.has("k_norm")))
    throw given.failure("flat_norms is given without q_norm and k_norm; expected all or none");
  if (shape.shares_kv && shape.flat_norms)
    throw given.failure("shares_kv and flat_norms are given; expected one of them");
  return shape;
}

std::shared_ptr<GqaBlock> make_gqa(BlockArguments given) {
  const int layer = given.value<int>("layer");
  const GqaShape shape = gqa_shape(given);
  const int64_t out_rows = int64_t{shape.num_heads} * shape.head_dim;
  const int64_t kv_heads = shape.shares_kv ? 0 : shape.num_kv_heads, kv_rows = kv_heads * shape.head_dim;
  const int64_t value_rows = shape.keys_are_values ? 0 : kv_heads * shape.value_dim;
  const int64_t gate_rows = int64_t{shape.num_heads} * shape.gate_rows;
  const int64_t rows = (shape.gated ? 2 : 1) * out_rows + kv_rows + value_rows + gate_rows;
  const PackedMatrix& qkv = given.packed("qkv_weight", rows, kAny);
  const int64_t hidden = qkv.columns();
  const GqaWeights weights{
      .norm = given.optional_vector("norm_weight", hidden),
      .qkv = &qkv,
      .qkv_bias = given.optional_vector("qkv_bias", rows),
      .q_norm = given.optional_vector("q_norm", shape.flat_norms ? out_rows : shape.head_dim),
      .k_norm = given.optional_vector("k_norm", shape.flat_norms ? kv_rows : shape.head_dim),
      .v_norm = given.optional_vector("v_norm", shape.value_dim),
      .q_scale = given.optional_vector("q_scale", shape.head_dim),
      .o = &given.packed("o_weight", hidden, int64_t{shape.num_heads} * shape.value_dim),
      .o_bias = given.optional_vector("o_bias", hidden),
      .sinks = given.optional_vector("sinks", shape.num_heads),
  };
  const PoolView& pool = given.pool();
  return given.own(GqaBlock(GqaAttention(pool.kernels(), pool, weights, shape), layer));
}

std::shared_ptr<MlaBlock> make_mla(BlockArguments given) {
  const int layer = given.value<int>("layer"), num_heads = given.at_least(1, "num_heads");
  const int nope = given.at_least(1, "nope_dim"), rope = given.at_least(1, "rope_dim");
  if (rope % 2 != 0) throw given.failure("rope_dim is " + std::to_string(rope) + "; expected an even number");
  if (given.has("q_b_weight") && !given.has("q_norm"))
    throw given.failure("q_b_weight is given without q_norm; expected both or none");
  const int64_t queries = int64_t{num_heads} * (nope + rope);
  const PackedMatrix* q_b = given.has("q_b_weight") ? &given.packed("q_b_weight", queries, kAny) : nullptr;
  const int64_t q_rows = q_b != nullptr ? q_b->columns() : queries;
  const PackedMatrix& v_b = given.packed("v_b_weight", kAny, kAny);
  const int64_t latent = v_b.columns(), value = v_b.rows() / num_heads;
  const PackedMatrix& k_b = given.packed("k_b_weight", num_heads * latent, nope);
  given.expect_heads("k_b_weight", k_b, num_heads, latent);
  given.expect_heads("v_b_weight", v_b, num_heads, value);
  const PackedMatrix& a = given.packed("a_weight", q_rows + latent + rope, kAny);
  const int64_t hidden = a.columns();
  const MlaWeights weights{
      .norm = given.vector("norm_weight", hidden),
      .a = &a,
      .a_bias = given.optional_vector("a_bias", a.rows()),
      .q_norm = given.optional_vector("q_norm", q_rows),
      .q_b = q_b,
      .latent_norm = given.vector("latent_norm", latent),
      .k_b = &k_b,
      .v_b = &v_b,
      .o = &given.packed("o_weight", hidden, num_heads * value),
      .o_bias = given.optional_vector("o_bias", hidden),
  };
  const MlaShape shape{
      .num_heads = num_heads,
      .nope = nope,
      .rope = rope,
      .latent = static_cast<int>(latent),
      .value = static_cast<int>(value),
      .eps = given.value<float>("eps"),
      .latent_eps = given.value<float>("latent_eps"),
      .scale = given.value<float>("scale"),
      .neighbours = given.value<bool>("neighbours"),
      .temperature = temperature_of(given),
  };
  const PoolView& pool = given.pool();
  return given.own(MlaBlock(MlaAttention(pool.kernels(), pool, weights, shape), layer));
}

std::shared_ptr<GatedDeltaBlock> make_gated_delta(BlockArguments given) {
  const int layer = given.value<int>("layer");
  const TensorView conv = given.array("conv"), head_norm = given.array("head_norm");
  const float* of_head = expect_f32(head_norm, given.where("head_norm").c_str(), {kAny});
  GatedDeltaShape shape{
      .num_k_heads = given.at_least(1, "num_k_heads"),
      .num_v_heads = given.at_least(1, "num_v_heads"),
      .key_dim = given.at_least(1, "key_dim"),
      .value_dim = static_cast<int>(head_norm.shape[0]),
      .taps = 0,
      .eps = given.value<float>("eps"),
      .tiled = given.value<bool>("tiled"),
      .grouped = given.value<bool>("grouped"),
      .grouped_gates = given.value<bool>("grouped_gates"),
  };
  expect_multiple(given, "num_v_heads", shape.num_v_heads, "num_k_heads", shape.num_k_heads);
  if (shape.value_dim < 1) throw given.failure("value_dim is 0; expected at least 1");
  const float* taps = expect_f32(conv, given.where("conv").c_str(), {kAny, shape.channels()});
  shape.taps = expect_taps(given, conv);
  if (shape.tiled && (shape.grouped || shape.grouped_gates))
    throw given.failure("tiled and grouped are given; expected one of them");
  const PackedMatrix& in = given.packed("in_weight", shape.inputs(), kAny);
  const GatedDeltaWeights weights{
      .norm = given.vector("norm_weight", in.columns()),
      .in = &in,
      .conv = taps,
      .decay_rate = given.vector("decay_rate", shape.num_v_heads),
      .decay_bias = given.vector("decay_bias", shape.num_v_heads),
      .head_norm = of_head,
      .out = &given.packed("out_weight", in.columns(), shape.values()),
  };
  const PoolView& pool = given.pool();
  return given.own(GatedDeltaBlock(GatedDeltaNet(pool.kernels(), pool, weights, shape), layer));
}

std::shared_ptr<ConvolutionBlock> make_convolution(BlockArguments given) {
  const int layer = given.value<int>("layer");
  const float eps = given.value<float>("eps");
  const PackedMatrix& in = given.packed("in_weight", kAny, kAny);
  const int64_t hidden = in.columns();
  given.expect_size("in_weight", in, 3 * hidden, hidden);
  const TensorView conv = given.array("conv");
  const ShortConvolutionWeights weights{
      .norm = given.vector("norm_weight", hidden),
      .in = &in,
      .in_bias = given.optional_vector("in_bias", 3 * hidden),
      .conv = expect_f32(conv, given.where("conv").c_str(), {kAny, hidden}),
      .conv_bias = given.optional_vector("conv_bias", hidden),
      .out = &given.packed("out_weight", hidden, hidden),
      .out_bias = given.optional_vector("out_bias", hidden),
  };
  const PoolView& pool = given.pool();
  return given.own(ConvolutionBlock(
      ShortConvolution(pool.kernels(), pool, weights, expect_taps(given, conv), eps), layer));
}

}  // namespace

void bind_attention(py::module_& m) {
  bind_block<GqaBlock>(m, "Gqa", "Grouped-query attention.", &make_gqa);
  bind_block<MlaBlock>(m, "Mla", "Multi-head latent attention.", &make_mla);
  bind_block<ConvolutionBlock>(m, "ShortConvolution", "A gated short convolution.", &make_convolution);
  bind_block<GatedDeltaBlock>(m, "GatedDelta", "A gated delta net.", &make_gated_delta)
      .def_static(
          "record_bytes",
          [](int num_k_heads, int num_v_heads, int key_dim, int value_dim, int taps) {
            return GatedDeltaShape{.num_k_heads = num_k_heads,
                                   .num_v_heads = num_v_heads,
                                   .key_dim = key_dim,
                                   .value_dim = value_dim,
                                   .taps = taps}
                .record_bytes();
          },
          py::kw_only(), py::arg("num_k_heads"), py::arg("num_v_heads"), py::arg("key_dim"),
          py::arg("value_dim"), py::arg("taps"));
}

}  // namespace twofold::bindings
