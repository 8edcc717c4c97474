"""The whole shapes of public MoE models, as their config.json files give them: what a random model is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class FullShape:
    """Sizes of a decoder. `layers` may be cut; everything else stays as the real model has it."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    """Of one expert."""
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
    """Of every other layer; 0: none."""

    def with_layers(self, layers: int) -> FullShape:
        return replace(self, layers=layers)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def attention_weights(self) -> int:
        """q, k, v and o of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def weights(self) -> int:
        """All matrices of the model: experts, attention, embedding and output. Norms and routers are left out."""
        layer = self.experts * self.expert_weights + self.attention_weights
        return self.layers * layer + 2 * self.vocab * self.hidden

    @property
    def weights_per_token(self) -> int:
        """Matrices read for one decoded token: routed experts, attention and output, without one row of embedding."""
        layer = self.top_k * self.expert_weights + self.attention_weights
        return self.layers * layer + self.vocab * self.hidden


FULL_SHAPES: Final[Mapping[str, FullShape]] = {
    shape.name: shape
    for shape in (
        FullShape("qwen3-30b-a3b", 48, 2048, 768, 128, 8, 32, 4, 128, 151_936),
        FullShape("qwen3-235b-a22b", 94, 4096, 1536, 128, 8, 64, 4, 128, 151_936),
        FullShape(
            "gpt-oss-120b",
            36,
            2880,
            2880,
            128,
            4,
            64,
            8,
            64,
            201_088,
            rope_base=150_000.0,
            norm_eps=1e-5,
            architecture="gpt-oss",
            window=128,
        ),
        # For the tests and for a first try: every part is there, nothing takes time.
        FullShape("tiny", 2, 256, 256, 8, 2, 4, 2, 64, 512, context=1024),
    )
}
