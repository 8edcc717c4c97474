"""Residual: how the outputs of a layer's parts get into the residual stream, as a family describes it."""

from __future__ import annotations

from dataclasses import dataclass

from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gated_norm import GatedNorm
from twofold.blocks.gqa import Gqa
from twofold.blocks.hyper_connection import HyperConnection, StreamHead, StreamMix
from twofold.blocks.post_norm import PostNorm
from twofold.blocks.router import Router

ATTENTION, FEED_FORWARD = range(2)
"""Parts of a layer."""


@dataclass(frozen=True)
class Residual:
    """Outputs are added to one stream."""

    @property
    def num_streams(self) -> int:
        return 1

    def around(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        """The blocks of a part, and what puts their output into the stream."""
        return blocks

    def after_last(self) -> tuple[Block, ...]:
        """Blocks after the last layer's."""
        return ()

    def after_predicting(self) -> tuple[Block, ...]:
        """Blocks after those of a layer that predicts the token after the next one."""
        return ()


@dataclass(frozen=True)
class PostNorms(Residual):
    """Outputs of some parts are normed before they are added."""

    attention: tuple[str, str] | None = None
    """(name, GGUF name) of the norm of attention's output."""
    feed_forward: tuple[str, str] | None = None
    experts_alone: bool = False
    """Whether dense feed-forward parts have no such norm."""

    def around(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        names, first = (self.attention, self.feed_forward)[part], blocks[0]
        if names is None or not isinstance(first, Gqa | DenseFfn | Router):
            return blocks
        if self.experts_alone and isinstance(first, DenseFfn):
            return blocks
        size, eps, centred = first.hidden_size, first.eps, first.zero_centred
        return (*blocks, PostNorm(0, size, eps, *names, over=len(blocks), zero_centred=centred))


@dataclass(frozen=True)
class GatedNorms(Residual):
    """The inputs of attention and of experts are normed with a gate; these have no norm themselves."""

    hidden_size: int
    eps: float
    rank: int

    def around(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        if isinstance(blocks[0], DenseFfn):
            return blocks
        name = ("input_layernorm", "post_attention_layernorm")[part]
        return (*blocks, GatedNorm(0, self.hidden_size, self.eps, self.rank, name=name, over=len(blocks)))


@dataclass(frozen=True)
class Streams(Residual):
    """Several streams, joined with each part by a hyper-connection."""

    mix: StreamMix
    attention: tuple[str, str] = ("attn_hc", "hc_attn_")
    """(name, what GGUF names begin with) of attention's hyper-connection, within the layer."""
    feed_forward: tuple[str, str] = ("ffn_hc", "hc_ffn_")
    head: tuple[str, str] | None = ("model.hc_head.hc_", "output_hc_")
    """Prefixes of the names of what reads the streams after the last layer; None: their mean is read."""

    predicting_head: tuple[str, str] | None = None
    """The same after an MTP layer, with {} for the layer; None: there is none."""

    @property
    def num_streams(self) -> int:
        return self.mix.num_streams

    def around(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        names = (self.attention, self.feed_forward)[part]
        return (*blocks, HyperConnection(0, self.mix, *names, over=len(blocks)))

    def after_last(self) -> tuple[Block, ...]:
        return () if self.head is None else (StreamHead(0, self.mix, *self.head),)

    def after_predicting(self) -> tuple[Block, ...]:
        return () if self.predicting_head is None else (StreamHead(0, self.mix, *self.predicting_head),)
