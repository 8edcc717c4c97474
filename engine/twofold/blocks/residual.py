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

    def around(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        """The blocks of a part, and what puts their output into the stream."""
        return blocks

    def after_last(self) -> tuple[Block, ...]:
        """Blocks after the last layer's."""
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
    magnitude: float
    attention: str = "attn_hc"
    """Name of attention's hyper-connection."""
    feed_forward: str = "ffn_hc"
    head: str | None = "model.hc_head.hc_"
    """Prefix of the names of what joins the streams after the last layer; None: their mean is read."""

    def around(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        name = (self.attention, self.feed_forward)[part]
        return (*blocks, HyperConnection(0, self.mix, name, self.magnitude, over=len(blocks)))

    def after_last(self) -> tuple[Block, ...]:
        return () if self.head is None else (StreamHead(0, self.mix, self.head),)
