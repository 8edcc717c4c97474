// Blocks that mix tokens of a sequence: attention kinds, gated delta nets, short convolutions.
#include <memory>
#include <string>
#include <utility>

#include "blocks/attention_parts.h"
#include "blocks/bind_blocks.h"
#include "blocks/block_arguments.h"
#include "fields.h"
#include "moe/blocks.h"
#include "ops/attention/gqa.h"
#include "ops/attention/indexer.h"
#include "ops/attention/mla.h"
#include "ops/attention/parts/selection.h"
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

// The heads, and where the projection has them; `gate` says where it has their gates.
QkvRows qkv_rows_of(BlockArguments& given) {
  return given.part("heads", [](BlockArguments& part) {
    const int head_dim = part.at_least(1, "head_dim");
    const QkvRows rows{
        .num_heads = part.at_least(1, "num_heads"),
        .num_kv_heads = part.at_least(1, "num_kv_heads"),
        .head_dim = head_dim,
        .value_dim = part.has("value_dim") ? part.at_least(1, "value_dim") : head_dim,
        .keys_are_values = part.value("keys_are_values", false),
        .shares_kv = part.value("shares_kv", false),
        .value_scale = part.value("value_scale", 1.0f),
    };
    expect_multiple(part, "num_heads", rows.num_heads, "num_kv_heads", rows.num_kv_heads);
    if (rows.value_dim != head_dim && rows.keys_are_values)
      throw part.failure("value_dim is given with keys_are_values; expected one of them");
    return rows;
  });
}

// A gate of the heads' outputs, whose place it enters in `rows`.
OutputGate output_gate_of(BlockArguments& given, QkvRows& rows) {
  if (!given.has("gate")) return {};
  return given.part("gate", [&](BlockArguments& part) {
    OutputGate gate{.kind = gate_kind_of(part)};
    rows.interleaved_gate = part.value("interleaved", false);
    rows.gate_rows = part.at_least(0, "rows");
    gate.by_head = rows.gate_rows == 1;
    if (rows.interleaved_gate ? rows.gate_rows != 0 : rows.gate_rows != 1 && rows.gate_rows != rows.value_dim)
      throw part.failure("rows is " + std::to_string(rows.gate_rows) +
                         "; expected 1 or value_dim, or 0 for an interleaved gate");
    if (rows.interleaved_gate && rows.value_dim != rows.head_dim)
      throw part.failure("interleaved is given with a value_dim; expected one of them");
    return gate;
  });
}

HeadNorms head_norms_of(BlockArguments& given, const QkvRows& rows) {
  HeadNorms norms;
  norms.flat = given.value("flat_norms", false);
  norms.q = norm_of(given, "q_norm", norms.flat ? rows.query_rows() : rows.head_dim);
  norms.k = norm_of(given, "k_norm", norms.flat ? rows.key_rows() : rows.head_dim);
  norms.v = norm_of(given, "v_norm", rows.value_dim);
  if (norms.flat && (norms.q.weight == nullptr || norms.k.weight == nullptr))
    throw given.failure("flat_norms is given without q_norm and k_norm; expected all or none");
  if (norms.flat && (rows.interleaved_gate || rows.shares_kv))
    throw given.failure("flat_norms is given with an interleaved gate or shares_kv; expected one of them");
  return norms;
}

std::shared_ptr<GqaBlock> make_gqa(BlockArguments given) {
  const int layer = given.value<int>("layer");
  GqaParts parts;
  parts.rows = qkv_rows_of(given);
  parts.gate = output_gate_of(given, parts.rows);
  const QkvRows& rows = parts.rows;
  parts.project = projection_of(given, "project", rows.size(), kAny);
  parts.norms = head_norms_of(given, rows);
  parts.rotation = rotation_of(given);
  parts.scale = query_scale_of(given, rows.num_heads, rows.head_dim);
  parts.select = selection_of(given);
  parts.scores = scores_of(given, rows.num_heads);
  const int64_t hidden = parts.project.columns();
  parts.out = projection_of(given, "out", hidden, int64_t{rows.num_heads} * rows.value_dim);
  const PoolView& pool = given.pool();
  return given.own(GqaBlock(GqaAttention(pool.kernels(), pool, std::move(parts)), layer));
}

// A gate of latent attention's heads, in the last rows of its projection, or after each head's query.
OutputGate mla_gate_of(BlockArguments& given, int value_dim, bool& interleaved) {
  if (!given.has("gate")) return {};
  return given.part("gate", [&](BlockArguments& part) {
    OutputGate gate{.kind = gate_kind_of(part)};
    interleaved = part.value("interleaved", false);
    const int rows = part.at_least(0, "rows");
    gate.by_head = rows == 1;
    if (interleaved ? rows != 0 : rows != 1 && rows != value_dim) {
      throw part.failure("rows is " + std::to_string(rows) + "; expected 1 or " + std::to_string(value_dim) +
                         ", or 0 for an interleaved gate");
    }
    return gate;
  });
}

std::shared_ptr<MlaBlock> make_mla(BlockArguments given) {
  const int layer = given.value<int>("layer");
  MlaShape shape{.num_heads = given.at_least(1, "num_heads"),
                 .nope = given.at_least(1, "nope_dim"),
                 .rope = given.at_least(0, "rope_dim"),
                 .latent = 0,
                 .value = 0};
  if (shape.rope % 2 != 0)
    throw given.failure("rope_dim is " + std::to_string(shape.rope) + "; expected an even number");
  const PackedMatrix& v_b = given.packed("v_b", kAny, kAny);
  shape.latent = static_cast<int>(v_b.columns());
  shape.value = static_cast<int>(v_b.rows()) / shape.num_heads;
  const PackedMatrix& k_b = given.packed("k_b", int64_t{shape.num_heads} * shape.latent, shape.nope);
  given.expect_heads("k_b", k_b, shape.num_heads, shape.latent);
  given.expect_heads("v_b", v_b, shape.num_heads, shape.value);
  bool interleaved = false;
  const OutputGate gate = mla_gate_of(given, shape.value, interleaved);
  const int64_t queries = int64_t{shape.num_heads} * (shape.key() + (interleaved ? shape.value : 0));
  const Projection q_b = given.has("q_b") ? projection_of(given, "q_b", queries, kAny) : Projection{};
  if (q_b.weight != nullptr && q_b.norm == nullptr)
    throw given.failure("q_b is given without a norm; expected both or none");
  const int64_t low = q_b.weight == nullptr ? 0 : q_b.columns() / (q_b.doubled ? 2 : 1);
  const int64_t q_rows = q_b.weight != nullptr ? low : queries;
  const int kv_layer = given.has("kv_layer") ? given.at_least(0, "kv_layer") : -1;
  MlaParts parts{
      .shape = shape,
      .project = {},
      .q_b = q_b,
      .latent_norm = norm_of(given, "latent_norm", shape.latent),
      .key_norm = norm_of(given, "key_norm", shape.rope),
      .rotation = rotation_of(given),
      .scale = query_scale_of(given, shape.num_heads, 0),
      .k_b = &k_b,
      .v_b = &v_b,
      .select = selection_of(given),
      .scores = scores_of(given, shape.num_heads),
      .gate = gate,
      .interleaved_gate = interleaved,
      .out = {},
      .kv_layer = kv_layer,
  };
  if (parts.has_latents() != (parts.latent_norm.weight != nullptr))
    throw given.failure("latent_norm and kv_layer are given; expected one of them");
  const int64_t rows = q_rows + parts.latent_rows() + parts.gate_rows();
  parts.project = projection_of(given, "project", rows, kAny);
  const int64_t hidden = parts.project.columns();
  parts.out = projection_of(given, "out", hidden, int64_t{shape.num_heads} * shape.value);
  const PoolView& pool = given.pool();
  return given.own(MlaBlock(MlaAttention(pool.kernels(), pool, std::move(parts)), layer));
}

std::shared_ptr<Indexer> make_indexer(const PoolView& pool, const py::kwargs& arguments) {
  BlockArguments given("Indexer", pool, arguments);
  IndexerParts parts{.num_heads = given.at_least(1, "num_heads"),
                     .head_dim = given.at_least(1, "head_dim"),
                     .queries = {},
                     .of_input = given.value("of_input", false),
                     .input_norm = {},
                     .keys = {},
                     .query_norm = {},
                     .key_norm = {},
                     .rotation = rotation_of(given),
                     .scale = {},
                     .rotates_last = given.value("rotates_last", false),
                     .block = given.positive_or_zero("block"),
                     .local = given.positive_or_zero("local"),
                     .pool = given.positive_or_zero("pooled"),
                     .pool_rotation = rotation_of(given, "pool_rotation")};
  if (parts.pool > 0 && (parts.block > 0 || parts.rotates_last))
    throw given.failure("pooled is given with block or rotates_last; expected one of them");
  if (given.has("pool_bias")) {
    const TensorView bias = given.array("pool_bias");
    parts.pool_bias = expect_f32(bias, given.where("pool_bias").c_str(), {parts.pool, parts.head_dim});
  }
  const bool has_weights = parts.block == 0 && (parts.pool == 0 || parts.pool_bias != nullptr);
  const int weights = has_weights ? parts.num_heads : 0;
  parts.keys = projection_of(given, "keys", parts.num_planes() * parts.head_dim + weights, kAny);
  const int64_t columns = parts.of_input ? parts.keys.columns() : kAny;
  parts.queries = projection_of(given, "queries", int64_t{parts.num_heads} * parts.head_dim, columns);
  parts.input_norm = norm_of(given, "input_norm", parts.queries.columns());
  if (parts.input_norm.weight != nullptr && (!parts.of_input || parts.queries.norm == nullptr))
    throw given.failure("input_norm is given; expected of_input and a norm of queries with it");
  parts.scale = query_scale_of(given, parts.num_heads, parts.head_dim);
  parts.query_norm = norm_of(given, "query_norm", parts.head_dim);
  parts.key_norm = norm_of(given, "key_norm", parts.head_dim);
  return given.own(Indexer(given.pool().kernels(), given.pool(), parts));
}

std::shared_ptr<GatedDeltaBlock> make_gated_delta(BlockArguments given) {
  const int layer = given.value<int>("layer");
  const TensorView conv = given.array("conv");
  GatedDeltaShape shape{
      .num_k_heads = given.at_least(1, "num_k_heads"),
      .num_v_heads = given.at_least(1, "num_v_heads"),
      .key_dim = given.at_least(1, "key_dim"),
      .value_dim = given.at_least(1, "value_dim"),
      .taps = 0,
      .tiled = given.value<bool>("tiled"),
      .grouped = given.value<bool>("grouped"),
      .grouped_gates = given.value<bool>("grouped_gates"),
      .record_at = given.value<int64_t>("record_at", 0),
  };
  expect_multiple(given, "num_v_heads", shape.num_v_heads, "num_k_heads", shape.num_k_heads);
  const float* taps = expect_f32(conv, given.where("conv").c_str(), {kAny, shape.channels()});
  shape.taps = expect_taps(given, conv);
  if (shape.tiled && (shape.grouped || shape.grouped_gates))
    throw given.failure("tiled and grouped are given; expected one of them");
  const Projection project = projection_of(given, "project", shape.inputs(), kAny);
  const GatedDeltaParts parts{
      .project = project,
      .conv = taps,
      .decay_rate = given.vector("decay_rate", shape.num_v_heads),
      .decay_bias = given.vector("decay_bias", shape.num_v_heads),
      .head_norm = norm_of(given, "head_norm", shape.value_dim),
      .gate = {.kind = given.part("gate", gate_kind_of)},
      .out = projection_of(given, "out", project.columns(), shape.values()),
  };
  const PoolView& pool = given.pool();
  return given.own(GatedDeltaBlock(GatedDeltaNet(pool.kernels(), pool, parts, shape), layer));
}

std::shared_ptr<ConvolutionBlock> make_convolution(BlockArguments given) {
  const int layer = given.value<int>("layer");
  const Projection project = projection_of(given, "project", kAny, kAny);
  const int64_t hidden = project.columns();
  given.expect_size("project", *project.weight, 3 * hidden, hidden);
  const TensorView conv = given.array("conv");
  const float* taps = expect_f32(conv, given.where("conv").c_str(), {kAny, hidden});
  const ShortConvolutionParts parts{
      .project = project,
      .conv = {taps, expect_taps(given, conv), static_cast<int>(hidden)},
      .conv_bias = given.optional_vector("conv_bias", hidden),
      .out = projection_of(given, "out", hidden, hidden),
  };
  const auto record_at = given.value<int64_t>("record_at", 0);
  const PoolView& pool = given.pool();
  return given.own(ConvolutionBlock(ShortConvolution(pool.kernels(), pool, parts, record_at), layer));
}

}  // namespace

#define TWOFOLD_BIND_FIELD(type, name, otherwise) , field(#name, &Struct::name, type{otherwise})

void bind_attention(py::module_& m) {
  {
    using Struct = kernels::Stretch;
    def_fields(py::class_<Struct>(m, "Stretch", "One stretch of positions that a query attends to.")
                   TWOFOLD_STRETCH(TWOFOLD_BIND_FIELD));
  }
  {
    using Struct = kernels::ScoreRule;
    def_fields(py::class_<Struct>(m, "ScoreRule", "Scaling and capping of the product of a query and a key.")
                   TWOFOLD_SCORE_RULE(TWOFOLD_BIND_FIELD));
  }
  py::class_<Chooser, std::shared_ptr<Chooser>>(m, "Chooser",
                                                "Chooses positions for the queries of a layer.");
  py::class_<Indexer, Chooser, std::shared_ptr<Indexer>>(m, "Indexer", "Chooses positions by learned scores.")
      .def(py::init(&make_indexer), py::arg("pool"));
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
