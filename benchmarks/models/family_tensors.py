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
from benchmarks.models.shapes import FullShape

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
    yield make.norm("attn_norm", shape.hidden)
    yield from family.attention(shape, layer, make)
    yield make.norm(family.second_norm, shape.hidden)
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


def latent_query(shape: FullShape, layer: int, make: TensorMaker) -> Iterator[Tensor]:
    latent = shape.latent
    assert latent is not None
    yield make.dense("attn_q_a", shape.hidden, latent.q_rank)
    yield make.norm("attn_q_a_norm", latent.q_rank)
    yield make.dense("attn_q_b", latent.q_rank, shape.heads * (latent.nope + latent.rope))
    yield make.dense("attn_kv_a_mqa", shape.hidden, latent.kv_rank + latent.rope)
    yield make.norm("attn_kv_a_norm", latent.kv_rank)
    yield make.dense("attn_k_b", latent.nope, latent.kv_rank, shape.heads)
    yield make.dense("attn_v_b", latent.kv_rank, latent.value, shape.heads)
    yield make.dense("attn_output", shape.heads * latent.value, shape.hidden)


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
    if shape.architecture == "qwen35moe":
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


@dataclass(frozen=True)
class Family:
    attention: Callable[[FullShape, int, TensorMaker], Iterator[Tensor]]
    write_keys: Callable[[Any, FullShape], None] = write_no_keys
    beside_experts: Callable[[FullShape, TensorMaker], Iterator[Tensor]] = no_tensors
    second_norm: str = "post_attention_norm"
    word_rule: str = "qwen2"
    """The tokenizer's."""


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "qwen3moe": Family(normed_query, second_norm="ffn_norm"),
        "gpt-oss": Family(query_with_sinks, write_window_keys, biases, word_rule="gpt-4o"),
        "qwen3next": Family(delta_or_query, write_delta_keys, shared_gate),
        "qwen35moe": Family(delta_or_query, write_delta_keys, shared_gate, word_rule="qwen35"),
        "glm4moe": Family(biased_query, write_router_keys, correction_bias, word_rule="glm4"),
        "deepseek2": Family(latent_query, write_latent_keys, correction_bias, "ffn_norm", "deepseek-v3"),
    }
)
