"""The whole shapes of public MoE models, as their config.json files give them: what a random model is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class DeltaShape:
    """A gated delta net, in all layers but every fourth."""

    key_heads: int
    value_heads: int
    head_dim: int
    taps: int = 4


@dataclass(frozen=True)
class LatentShape:
    """DeepSeek's latent attention."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class IndexShape:
    """A learned indexer: what each query may attend to."""

    heads: int
    head_dim: int
    most: int
    """Positions of a query; blocks of positions where `block` is above 1."""
    block: int = 1
    """Positions of a block or pool."""
    every: int = 1
    """Layers from one indexer to the next; those between take its positions, or have a window (after the first two)."""


@dataclass(frozen=True)
class FullShape:
    """Sizes of a decoder. `layers` may be cut; everything else stays as the real model has it."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    """Intermediate size of one expert."""
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 4096
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    architecture: str = "qwen3moe"
    """GGUF's name of the family."""
    window: int = 0
    """Attention window of every other layer; 0: none."""
    rotary: int = 0
    """Dimensions of a head that are rotated, where not all are."""
    shared: int = 0
    """Intermediate size of the shared experts; 0: none."""
    dense_layers: int = 0
    """Number of first layers without experts, with a feed-forward of size `dense`."""
    dense: int = 0
    groups: int = 1
    """Groups of experts; experts are chosen from the better half of them."""
    delta: DeltaShape | None = None
    latent: LatentShape | None = None
    index: IndexShape | None = None
    wide: LatentShape | None = None
    """Latent attention of the layers with a window, which have half the heads."""
    streams: int = 0
    """Residual streams; 0: one, as usual."""
    stream_rank: int = 0
    """Rank of the gates that read streams; 0: none."""

    def with_layers(self, layers: int) -> FullShape:
        return replace(self, layers=layers)

    @property
    def expert_weights(self) -> int:
        """Gate, up and down of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def attention_weights(self) -> int:
        """q, k, v and o of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)


FULL_SHAPES: Final[Mapping[str, FullShape]] = {
    shape.name: shape
    for shape in (
        FullShape("qwen3-30b-a3b", 48, 2048, 768, 128, 8, 32, 4, 128, 151_936),
        FullShape("qwen3-235b-a22b", 94, 4096, 1536, 128, 8, 64, 4, 128, 151_936),
        FullShape(
            "gpt-oss-120b", 36, 2880, 2880, 128, 4, 64, 8, 64, 201_088, rope_base=150_000.0, norm_eps=1e-5,
            architecture="gpt-oss", window=128,
        ),
        FullShape(
            "qwen3-next-80b", 48, 2048, 512, 512, 10, 16, 2, 256, 151_936, rope_base=1e7,
            architecture="qwen3next", rotary=64, shared=512, delta=DeltaShape(16, 32, 128),
        ),
        FullShape(
            "qwen3.5-122b", 48, 3072, 1024, 256, 8, 32, 2, 256, 248_320, rope_base=1e7,
            architecture="qwen35moe", rotary=64, shared=1024, delta=DeltaShape(16, 64, 128),
        ),
        FullShape(
            "glm-4.5-air", 46, 4096, 1408, 128, 8, 96, 8, 128, 151_552, norm_eps=1e-5,
            architecture="glm4moe", rotary=64, shared=1408, dense_layers=1, dense=10_944,
        ),
        FullShape(
            "deepseek-v3", 61, 7168, 2048, 256, 8, 128, 128, 128, 129_280, rope_base=10_000.0,
            architecture="deepseek2", shared=2048, dense_layers=3, dense=18_432, groups=8,
            latent=LatentShape(1536, 512, 128, 64, 128),
        ),
        FullShape(
            "deepseek-v3.2", 61, 7168, 2048, 256, 8, 128, 128, 128, 129_280, context=65_536, rope_base=10_000.0,
            architecture="deepseek32", shared=2048, dense_layers=3, dense=18_432, groups=8,
            latent=LatentShape(1536, 512, 128, 64, 128), index=IndexShape(64, 128, 2048),
        ),
        FullShape(
            "glm-5", 78, 6144, 2048, 256, 8, 64, 64, 128, 154_880, context=65_536, rope_base=10_000.0, norm_eps=1e-5,
            architecture="glm-dsa", shared=2048, dense_layers=3, dense=12_288,
            latent=LatentShape(2048, 512, 192, 64, 256), index=IndexShape(32, 128, 2048),
        ),
        FullShape(
            "hy-4", 34, 2816, 768, 256, 8, 32, 32, 64, 120_832, context=65_536, rope_base=10_000.0, norm_eps=1e-5,
            architecture="hy_v4", shared=768, dense_layers=1, dense=6912,
            latent=LatentShape(1536, 512, 192, 64, 256), index=IndexShape(16, 128, 2048, every=4), streams=4,
        ),
        FullShape(
            "minimax-m3", 60, 6144, 3072, 128, 4, 64, 4, 128, 200_064, context=65_536, rope_base=5e6,
            architecture="minimax-m3", rotary=64, shared=3072, dense_layers=1, dense=12_288,
            index=IndexShape(4, 128, 16, block=128),
        ),
        FullShape(
            "dots3-note", 46, 5120, 1536, 256, 8, 128, 128, 128, 152_064, context=65_536, rope_base=8e7, norm_eps=1e-5,
            architecture="dots3note", window=512, shared=1536, dense_layers=1, dense=13_824,
            latent=LatentShape(1024, 512, 128, 64, 128), index=IndexShape(64, 128, 2048, every=4),
            wide=LatentShape(1024, 1024, 192, 64, 128),
        ),
        # The sizes of the indexer are not in the configuration's defaults: these are its neighbours'.
        FullShape(
            "qwen3.8-flash-next", 40, 2048, 512, 512, 10, 16, 2, 256, 248_320, context=65_536, rope_base=1e7,
            architecture="qwen4exp", rotary=64, shared=512, delta=DeltaShape(16, 32, 128),
            index=IndexShape(16, 128, 2048, block=16), streams=4, stream_rank=320,
        ),
        # For the tests and for a first try: every part is there, nothing takes time.
        FullShape("tiny", 2, 256, 256, 8, 2, 4, 2, 64, 512, context=1024),
    )
}  # fmt: skip
