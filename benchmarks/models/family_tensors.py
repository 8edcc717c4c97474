"""Tensors of a layer in each family's GGUF files, and the header keys of each family.

Names and sizes are llama.cpp's: a file that it loads and we load is read by two programs that agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from benchmarks.models.random_blocks import GGUF_FORMATS, BlockFormat, row_bytes
from benchmarks.models.shapes import FullShape, IndexShape, LatentShape

if TYPE_CHECKING:
    import gguf


@dataclass(frozen=True)
class Tensor:
    """A tensor of `stacks` matrices [rows, columns]; stacks is 0 for one matrix, rows too for a vector."""

    name: str
    block_format: BlockFormat
    columns: int
    rows: int = 0
    stacks: int = 0
    fill: float | None = None
    """Constant for all values, instead of random ones."""

    @property
    def byte_shape(self) -> tuple[int, ...]:
        width = row_bytes(self.block_format, self.columns)
        return (*(size for size in (self.stacks, self.rows) if size), width)

    @property
    def bytes(self) -> int:
        return math.prod(self.byte_shape)

    @property
    def all_rows(self) -> int:
        return max(self.stacks, 1) * max(self.rows, 1)


@dataclass(frozen=True)
class TensorMaker:
    """Tensors of a file whose matrices are in one format.

    Rows that its blocks do not divide are Q8_0, and so is all that is no expert of a model in MXFP4, as published files
    have it.
    """

    format_name: str

    def experts(self, part: str, columns: int, rows: int, stacks: int) -> Tensor:
        return Tensor(
            f"ffn_{part}_exps.weight", self._fitting(self.format_name, columns), columns, rows, stacks
        )

    def dense(self, name: str, columns: int, rows: int, stacks: int = 0) -> Tensor:
        requested = "q8_0" if self.format_name == "mxfp4" else self.format_name
        return Tensor(f"{name}.weight", self._fitting(requested, columns), columns, rows, stacks)

    def feed_forward(self, suffix: str, hidden: int, inner: int) -> Iterator[Tensor]:
        for part in ("gate", "up"):
            yield self.dense(f"ffn_{part}{suffix}", hidden, inner)
        yield self.dense(f"ffn_down{suffix}", inner, hidden)

    def plain(self, name: str, columns: int, rows: int = 0) -> Tensor:
        """Random float32, which routers and biases always are."""
        return Tensor(name, GGUF_FORMATS["f32"], columns, rows)

    def norm(self, name: str, size: int) -> Tensor:
        return Tensor(f"{name}.weight", GGUF_FORMATS["f32"], size, fill=1.0)

    @staticmethod
    def _fitting(name: str, columns: int) -> BlockFormat:
        requested = GGUF_FORMATS[name]
        return GGUF_FORMATS["q8_0"] if columns % requested.columns else requested


def tensors_of_layer(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    """Names begin behind "blk.N."."""
    family = FAMILIES[shape.architecture]
    if not shape.stream_rank:
        yield make.norm("attn_norm", shape.hidden)
    yield from family.attention(shape, layer, make)
    if not shape.stream_rank:
        yield make.norm(family.second_norm, shape.hidden)
    if shape.streams:
        for part in ("hc_attn", "hc_ffn"):
            yield from mixed_streams(shape, part, make)
    if layer < shape.dense_layers:
        yield from make.feed_forward("", shape.hidden, shape.dense)
        return
    hidden, inner, experts = shape.hidden, shape.intermediate, shape.experts
    yield make.plain("ffn_gate_inp.weight", hidden, experts)
    for part in ("gate", "up"):
        yield make.experts(part, hidden, inner, experts)
    yield make.experts("down", inner, hidden, experts)
    if shape.shared:
        yield from make.feed_forward("_shexp", hidden, shape.shared)
    yield from family.beside_experts(shape, make)


def grouped_query(shape: FullShape, layer: int, make: TensorMaker, queries: int = 1) -> Iterator[Tensor]:
    """q (with a gate behind each head where `queries` is 2), k, v and output."""
    wide, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield make.dense("attn_q", shape.hidden, queries * wide)
    yield make.dense("attn_k", shape.hidden, keys)
    yield make.dense("attn_v", shape.hidden, keys)
    yield make.dense("attn_output", wide, shape.hidden)


def normed_query(shape: FullShape, layer: int, make: TensorMaker, queries: int = 1) -> Iterator[Tensor]:
    yield from grouped_query(shape, layer, make, queries)
    for part in "qk":
        yield make.norm(f"attn_{part}_norm", shape.head_dim)


def biased_query(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    yield from grouped_query(shape, layer, make)
    yield make.plain("attn_q.bias", shape.heads * shape.head_dim)
    for part in "kv":
        yield make.plain(f"attn_{part}.bias", shape.kv_heads * shape.head_dim)


def query_with_sinks(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    yield from biased_query(shape, layer, make)
    yield make.plain("attn_output.bias", shape.hidden)
    yield make.plain("attn_sinks.weight", shape.heads)


def delta_or_query(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    """Three gated delta nets to a layer of gated attention."""
    delta = shape.delta
    if delta is None or layer % 4 == 3:
        yield from normed_query(shape, layer, make, queries=2)
        return
    values = delta.value_heads * delta.head_dim
    channels = 2 * delta.key_heads * delta.head_dim + values
    yield make.dense("attn_qkv", shape.hidden, channels)
    yield make.dense("attn_gate", shape.hidden, values)
    if shape.architecture == "qwen3next":
        yield make.dense("ssm_ba", shape.hidden, 2 * delta.value_heads)
    else:
        yield make.dense("ssm_alpha", shape.hidden, delta.value_heads)
        yield make.dense("ssm_beta", shape.hidden, delta.value_heads)
    yield make.plain("ssm_conv1d.weight", delta.taps, channels)
    yield Tensor("ssm_a", GGUF_FORMATS["f32"], delta.value_heads, fill=-1.0)
    yield make.plain("ssm_dt.bias", delta.value_heads)
    yield make.norm("ssm_norm", delta.head_dim)
    yield make.dense("ssm_out", values, shape.hidden)


def latent_query(
    shape: FullShape,
    layer: int,
    make: TensorMaker,
) -> Iterator[Tensor]:
    assert shape.latent is not None
    yield from latent_heads(shape.latent, shape.heads, shape.hidden, make)
    index = shape.index
    if index is None or not owns_indexer(index, layer):
        return
    yield make.dense("indexer.attn_q_b", shape.latent.q_rank, index.heads * index.head_dim)
    yield make.dense("indexer.attn_k", shape.hidden, index.head_dim)
    yield make.norm("indexer.k_norm", index.head_dim)
    yield make.plain("indexer.k_norm.bias", index.head_dim)
    yield make.plain("indexer.proj.weight", shape.hidden, index.heads)


def owns_indexer(index: IndexShape, layer: int) -> bool:
    return max(layer - 1, 0) % index.every == 0


def latent_heads(latent: LatentShape, heads: int, hidden: int, make: TensorMaker) -> Iterator[Tensor]:
    yield make.dense("attn_q_a", hidden, latent.q_rank)
    yield make.norm("attn_q_a_norm", latent.q_rank)
    yield make.dense("attn_q_b", latent.q_rank, heads * (latent.nope + latent.rope))
    yield make.dense("attn_kv_a_mqa", hidden, latent.kv_rank + latent.rope)
    yield make.norm("attn_kv_a_norm", latent.kv_rank)
    yield make.dense("attn_k_b", latent.nope, latent.kv_rank, heads)
    yield make.dense("attn_v_b", latent.kv_rank, latent.value, heads)
    yield make.dense("attn_output", heads * latent.value, hidden)


def gated_latent_query(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    """HY-4's: a gate for each value of a head, and sinks."""
    assert shape.latent is not None
    yield from latent_query(shape, layer, make)
    yield make.dense("attn_gate", shape.hidden, shape.heads * shape.latent.value)
    yield make.plain("attn_sinks.weight", shape.heads)


def latent_or_window(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    """dots3-note's: a gate for each head, a norm of the rotated part of keys, three of four layers with a window."""
    wide = shape.wide
    assert shape.latent is not None
    assert shape.index is not None
    assert wide is not None
    heads = shape.heads
    if not owns_indexer(shape.index, layer):
        heads //= 2
        yield from latent_heads(wide, heads, shape.hidden, make)
    else:
        yield from latent_query(shape, layer, make)
    yield make.dense("attn_gate", shape.hidden, heads)
    yield make.norm("attn_k_norm", shape.latent.rope)


def indexed_query(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    """MiniMax-M3's: an indexer of blocks in the layers with experts."""
    yield from normed_query(shape, layer, make)
    if layer >= shape.dense_layers:
        yield from query_indexer(shape, make)


def delta_or_indexed_query(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    """Qwen3.8's: three gated delta nets to a layer of gated attention with pooled keys of an indexer."""
    yield from delta_or_query(shape, layer, make)
    if layer % 4 == 3:
        yield from query_indexer(shape, make)


def query_indexer(shape: FullShape, make: TensorMaker) -> Iterator[Tensor]:
    index = shape.index
    assert index is not None
    yield make.dense("indexer.q_proj", shape.hidden, index.heads * index.head_dim)
    yield make.dense("indexer.k_proj", shape.hidden, index.head_dim)
    for part in "qk":
        yield make.norm(f"indexer.{part}_norm", index.head_dim)


def mixed_streams(shape: FullShape, part: str, make: TensorMaker) -> Iterator[Tensor]:
    """Weights by which residual streams are read and written; `part` names the block, or the head."""
    is_head = part == "output_hc"
    streams = shape.streams
    if shape.stream_rank:
        yield make.norm(f"{part}_norm", streams * shape.hidden)
        yield make.dense(f"{part}_down", streams * shape.hidden, shape.stream_rank)
        yield make.dense(f"{part}_up", shape.stream_rank, streams * shape.hidden)
        if not is_head:
            yield make.dense(f"{part}_inject", streams * shape.hidden, streams)
        return
    ways = 1 if is_head else 2
    yield make.plain(f"{part}_fn.weight", streams * shape.hidden, ways * streams)
    yield make.plain(f"{part}_base.weight", ways * streams)
    yield make.norm(f"{part}_scale", ways)


def no_tensors(shape: FullShape, make: TensorMaker) -> Iterator[Tensor]:
    yield from ()


def correction_bias(shape: FullShape, make: TensorMaker) -> Iterator[Tensor]:
    yield make.plain("exp_probs_b.bias", shape.experts)


def shared_gate(shape: FullShape, make: TensorMaker) -> Iterator[Tensor]:
    yield make.plain("ffn_gate_inp_shexp.weight", shape.hidden)


def biases(shape: FullShape, make: TensorMaker) -> Iterator[Tensor]:
    yield make.plain("ffn_gate_inp.bias", shape.experts)
    for part, size in (("gate", shape.intermediate), ("up", shape.intermediate), ("down", shape.hidden)):
        yield make.plain(f"ffn_{part}_exps.bias", size, shape.experts)


def write_no_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    """Writes nothing: the keys common to all families are enough."""


def write_window_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    writer.add_sliding_window(shape.window)


def write_delta_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    assert shape.delta is not None
    writer.add_expert_shared_feed_forward_length(shape.shared)
    writer.add_ssm_conv_kernel(shape.delta.taps)
    writer.add_ssm_state_size(shape.delta.head_dim)
    writer.add_ssm_group_count(shape.delta.key_heads)
    writer.add_ssm_time_step_rank(shape.delta.value_heads)
    writer.add_ssm_inner_size(shape.delta.value_heads * shape.delta.head_dim)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(shape.rotary)
    if shape.architecture in ("qwen35moe", "qwen4exp"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def write_router_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    import gguf

    writer.add_rope_dimension_count(shape.latent.rope if shape.latent else shape.rotary)
    writer.add_leading_dense_block_count(shape.dense_layers)
    writer.add_expert_shared_count(shape.shared // shape.intermediate)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    if shape.groups > 1:
        writer.add_expert_group_count(shape.groups)
        writer.add_expert_group_used_count(shape.groups // 2)


def write_latent_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    latent = shape.latent
    assert latent is not None
    write_router_keys(writer, shape)
    writer.add_vocab_size(shape.vocab)
    writer.add_expert_weights_scale(2.5)
    writer.add_q_lora_rank(latent.q_rank)
    writer.add_kv_lora_rank(latent.kv_rank)
    writer.add_key_length_mla(latent.nope + latent.rope)
    writer.add_value_length_mla(latent.value)


def write_index_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    index = shape.index
    assert index is not None
    writer.add_indexer_head_count(index.heads)
    writer.add_indexer_key_length(index.head_dim)
    writer.add_indexer_top_k(index.most)


def write_indexed_latent_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    write_latent_keys(writer, shape)
    write_index_keys(writer, shape)


def write_hyper_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    assert shape.index is not None
    write_indexed_latent_keys(writer, shape)
    arch, layers = shape.architecture, range(shape.layers)
    writer.add_array(f"{arch}.attention.indexer.types", [owns_indexer(shape.index, n) for n in layers])
    writer.add_uint32(f"{arch}.hyper_connection.count", shape.streams)
    writer.add_float32(f"{arch}.hyper_connection.epsilon", 1e-6)
    writer.add_float32(f"{arch}.hyper_connection.magnitude", 2.0)
    writer.add_swiglu_clamp_exp([10.0] * shape.layers)


def write_window_latent_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    wide, arch = shape.wide, shape.architecture
    assert shape.index is not None
    assert wide is not None
    write_indexed_latent_keys(writer, shape)
    windows = [not owns_indexer(shape.index, layer) for layer in range(shape.layers)]
    writer.add_head_count([shape.heads // (1 + each) for each in windows])
    writer.add_array(f"{arch}.attention.indexer.types", [not each for each in windows])
    writer.add_sliding_window(shape.window)
    writer.add_sliding_window_pattern(windows)
    writer.add_uint32(f"{arch}.attention.kv_lora_rank_swa", wide.kv_rank)
    writer.add_key_length_swa(wide.kv_rank + wide.rope)
    writer.add_value_length_swa(wide.kv_rank)
    writer.add_uint32(f"{arch}.attention.key_length_mla_swa", wide.nope + wide.rope)
    writer.add_uint32(f"{arch}.attention.value_length_mla_swa", wide.value)
    writer.add_rope_freq_base_swa(50_000.0)


def write_block_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    assert shape.index is not None
    write_router_keys(writer, shape)
    write_index_keys(writer, shape)
    writer.add_expert_weights_scale(2.0)
    writer.add_uint32("minimax-m3.attention.indexer.block_size", shape.index.block)
    writer.add_uint32("minimax-m3.attention.indexer.local_blocks", 1)


def write_pool_keys(writer: gguf.GGUFWriter, shape: FullShape) -> None:
    assert shape.index is not None
    write_delta_keys(writer, shape)
    write_index_keys(writer, shape)
    ratios = [shape.index.block * (layer % 4 == 3) for layer in range(shape.layers)]
    writer.add_array("qwen4exp.attention.compress_ratios", ratios)
    writer.add_uint32("qwen4exp.hyper_connection.count", shape.streams)
    writer.add_uint32("qwen4exp.hyper_connection.low_rank", shape.stream_rank)


@dataclass(frozen=True)
class Family:
    attention: Callable[[FullShape, int, TensorMaker], Iterator[Tensor]]
    write_keys: Callable[[Any, FullShape], None] = write_no_keys
    beside_experts: Callable[[FullShape, TensorMaker], Iterator[Tensor]] = no_tensors
    second_norm: str = "post_attention_norm"
    """Qwen3.8's gates of streams hold the norms instead."""
    word_rule: str = "qwen2"
    """The tokenizer's."""


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "qwen3moe": Family(normed_query, second_norm="ffn_norm"),
        "gpt-oss": Family(query_with_sinks, write_window_keys, biases, word_rule="gpt-4o"),
        "qwen3next": Family(delta_or_query, write_delta_keys, shared_gate),
        "qwen35moe": Family(delta_or_query, write_delta_keys, shared_gate, word_rule="qwen35"),
        "glm4moe": Family(biased_query, write_router_keys, correction_bias, word_rule="glm4"),
        "deepseek32": Family(
            latent_query, write_indexed_latent_keys, correction_bias, "ffn_norm", "deepseek-v3"
        ),
        "glm-dsa": Family(latent_query, write_indexed_latent_keys, correction_bias, "ffn_norm", "glm4"),
        "hy_v4": Family(gated_latent_query, write_hyper_keys, correction_bias, "ffn_norm", "hy_v4"),
        "dots3note": Family(latent_or_window, write_window_latent_keys, correction_bias, "ffn_norm", "qwen2"),
        "minimax-m3": Family(indexed_query, write_block_keys, correction_bias, "ffn_norm", "minimax-m2"),
        "qwen4exp": Family(delta_or_indexed_query, write_pool_keys, shared_gate, word_rule="qwen35"),
        "deepseek2": Family(latent_query, write_latent_keys, correction_bias, "ffn_norm", "deepseek-v3"),
    }
)
