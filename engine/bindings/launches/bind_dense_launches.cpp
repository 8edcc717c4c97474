// Launch arguments of kernels around a layer's experts: attention kinds, gated delta nets.
#include "delta_layer.h"
#include "dense_layer.h"
#include "fields.h"
#include "indexer_layer.h"
#include "launches/bind_launches.h"
#include "mla_layer.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

void bind_attention_launches(py::module_& m) {
  using cuda::DecodeAttention;
  using cuda::KvPages;
  using cuda::MlaDecode;
  using cuda::MlaPages;
  using cuda::MlaRows;
  using cuda::QkvRows;
  def_fields(py::class_<KvPages>(m, "KvPages",
                                 "One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim]."),
             field("keys", &KvPages::keys), field("values", &KvPages::values),
             field("page_size", &KvPages::page_size), field("num_kv_heads", &KvPages::num_kv_heads),
             field("head_dim", &KvPages::head_dim));
  def_fields(
      py::class_<QkvRows>(m, "QkvRows", "Projection rows for queries, keys and values, and their rotation."),
      field("qkv", &QkvRows::qkv), field("num_tokens", &QkvRows::num_tokens),
      field("num_heads", &QkvRows::num_heads), field("q_norm", &QkvRows::q_norm),
      field("k_norm", &QkvRows::k_norm), field("epsilon", &QkvRows::epsilon), field("cos", &QkvRows::cos),
      field("sin", &QkvRows::sin), field("rotary", &QkvRows::rotary),
      field("slot_mapping", &QkvRows::slot_mapping), field("v_norm", &QkvRows::v_norm, Address{}));
  using kernels::PositionLists;
  def_fields(
      py::class_<PositionLists>(m, "PositionLists",
                                "Ascending positions chosen for each query, i32 [queries, lists, most]."),
      field("positions", &PositionLists::positions), field("counts", &PositionLists::counts),
      field("most", &PositionLists::most), field("lists", &PositionLists::lists, 1));
  def_fields(py::class_<DecodeAttention>(m, "DecodeAttention", "One query per sequence over its pages."),
             field("q", &DecodeAttention::q), field("page_tables", &DecodeAttention::page_tables),
             field("seq_lens", &DecodeAttention::seq_lens),
             field("num_sequences", &DecodeAttention::num_sequences),
             field("num_heads", &DecodeAttention::num_heads), field("max_pages", &DecodeAttention::max_pages),
             field("max_length", &DecodeAttention::max_length), field("rule", &DecodeAttention::rule),
             field("select", &DecodeAttention::select), field("sinks", &DecodeAttention::sinks, Address{}),
             field("chosen", &DecodeAttention::chosen));
  def_fields(
      py::class_<MlaPages>(m, "MlaPages", "One layer's latents: bf16 [pages, page_size, latent + rope]."),
      field("rows", &MlaPages::rows), field("page_size", &MlaPages::page_size),
      field("latent", &MlaPages::latent), field("rope", &MlaPages::rope));
  def_fields(
      py::class_<MlaRows>(m, "MlaRows", "Outputs of latent attention's projections, and their destination."),
      field("compressed", &MlaRows::compressed), field("stride", &MlaRows::stride),
      field("queries", &MlaRows::queries), field("num_tokens", &MlaRows::num_tokens),
      field("num_heads", &MlaRows::num_heads), field("nope", &MlaRows::nope), field("norm", &MlaRows::norm),
      field("epsilon", &MlaRows::epsilon), field("cos", &MlaRows::cos), field("sin", &MlaRows::sin),
      field("neighbours", &MlaRows::neighbours), field("slot_mapping", &MlaRows::slot_mapping));
  def_fields(py::class_<MlaDecode>(m, "MlaDecode", "One absorbed query per sequence and head."),
             field("absorbed", &MlaDecode::absorbed), field("page_tables", &MlaDecode::page_tables),
             field("seq_lens", &MlaDecode::seq_lens), field("num_sequences", &MlaDecode::num_sequences),
             field("num_heads", &MlaDecode::num_heads), field("max_pages", &MlaDecode::max_pages),
             field("max_length", &MlaDecode::max_length), field("rule", &MlaDecode::rule),
             field("select", &MlaDecode::select), field("sinks", &MlaDecode::sinks, Address{}),
             field("chosen", &MlaDecode::chosen));
}

void bind_indexer(py::module_& m) {
  using cuda::IndexChoice;
  using cuda::IndexPages;
  using cuda::IndexPools;
  using cuda::IndexRows;
  def_fields(py::class_<IndexPages>(m, "IndexPages",
                                    "Keys of one layer's indexer: bf16 [pages, page_size, head_dim]."),
             field("keys", &IndexPages::keys), field("page_size", &IndexPages::page_size),
             field("head_dim", &IndexPages::head_dim));
  def_fields(
      py::class_<IndexRows>(m, "IndexRows", "Outputs of an indexer's projections, and their destination."),
      field("keys", &IndexRows::keys), field("stride", &IndexRows::stride),
      field("queries", &IndexRows::queries), field("num_tokens", &IndexRows::num_tokens),
      field("num_heads", &IndexRows::num_heads), field("query_norm", &IndexRows::query_norm),
      field("norm", &IndexRows::norm), field("bias", &IndexRows::bias), field("epsilon", &IndexRows::epsilon),
      field("cos", &IndexRows::cos), field("sin", &IndexRows::sin), field("rotary", &IndexRows::rotary),
      field("rotates_last", &IndexRows::rotates_last), field("neighbours", &IndexRows::neighbours),
      field("slot_mapping", &IndexRows::slot_mapping));
  def_fields(py::class_<IndexChoice>(m, "IndexChoice",
                                     "One query per sequence and head, and the best positions for it."),
             field("queries", &IndexChoice::queries), field("weights", &IndexChoice::weights),
             field("stride", &IndexChoice::stride), field("page_tables", &IndexChoice::page_tables),
             field("seq_lens", &IndexChoice::seq_lens), field("num_sequences", &IndexChoice::num_sequences),
             field("num_heads", &IndexChoice::num_heads), field("max_pages", &IndexChoice::max_pages),
             field("max_length", &IndexChoice::max_length), field("most", &IndexChoice::most),
             field("block", &IndexChoice::block, 1), field("local", &IndexChoice::local, 0),
             field("positions", &IndexChoice::positions), field("counts", &IndexChoice::counts),
             field("pooled", &IndexChoice::pooled, false));
  def_fields(
      py::class_<IndexPools>(m, "IndexPools",
                             "Pools of consecutive positions, whose keys are made of their positions' keys."),
      field("pool", &IndexPools::pool), field("page_tables", &IndexPools::page_tables),
      field("max_pages", &IndexPools::max_pages), field("sequences", &IndexPools::sequences),
      field("positions", &IndexPools::positions), field("slot_mapping", &IndexPools::slot_mapping),
      field("num_tokens", &IndexPools::num_tokens), field("norm", &IndexPools::norm),
      field("epsilon", &IndexPools::epsilon), field("cos", &IndexPools::cos), field("sin", &IndexPools::sin),
      field("rotary", &IndexPools::rotary));
}

void bind_delta(py::module_& m) {
  using cuda::DeltaRecords;
  using cuda::DeltaRows;
  def_fields(py::class_<DeltaRecords>(m, "DeltaRecords", "One layer's records of gated delta nets."),
             field("slabs", &DeltaRecords::slabs), field("tail", &DeltaRecords::tail),
             field("num_k_heads", &DeltaRecords::num_k_heads),
             field("num_v_heads", &DeltaRecords::num_v_heads), field("key_dim", &DeltaRecords::key_dim),
             field("value_dim", &DeltaRecords::value_dim), field("taps", &DeltaRecords::taps));
  def_fields(py::class_<DeltaRows>(m, "DeltaRows", "Outputs of a gated delta net's projections for tokens."),
             field("projected", &DeltaRows::projected), field("stride", &DeltaRows::stride),
             field("conv", &DeltaRows::conv), field("decay_rate", &DeltaRows::decay_rate),
             field("decay_bias", &DeltaRows::decay_bias), field("positions", &DeltaRows::positions),
             field("records", &DeltaRows::records), field("num_sequences", &DeltaRows::num_sequences),
             field("num_tokens", &DeltaRows::num_tokens), field("chain", &DeltaRows::chain));
}

}  // namespace

void bind_dense_launches(py::module_& m) {
  bind_attention_launches(m);
  bind_indexer(m);
  bind_delta(m);
}

}  // namespace twofold::bindings
