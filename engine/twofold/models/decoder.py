"""`Decoder`: a family described by its differences from grouped-query attention and feed-forward layers or experts.

A layer is (attention or the family's other mixer, feed-forward part), either followed by the block that puts its output
into the residual stream where it is not simply added. A feed-forward part is dense, or a router, shared experts and
routed experts. The fields are in that order. A family of this kind is one entry of `families/decoders.py`, not a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.residual import Residual
from twofold.blocks.rope import Arrangement
from twofold.blocks.router import Router
from twofold.models.gguf_config import GgufMetadata, Score
from twofold.models.keys import FromConfig, Settings
from twofold.weights.json_file import Fields

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def same(settings: Settings, layer: int, attention: Any) -> Any:
    return attention


@dataclass(frozen=True)
class Mixer:
    """What some layers have instead of attention."""

    kind: str
    """Its name in `layer_types`."""
    read: Callable[[Fields], Block]
    layers: Callable[[Fields, int], bool] | None = None
    """Whether a layer has it if there is no `layer_types`; None: the list has to be given."""


@dataclass(frozen=True)
class MtpLayer:
    """The layer after the last one that predicts the token after the next one, where it can be run.

    It has attention as the last layer, and experts.
    """

    dense: bool = False
    """Whether it has a dense feed-forward part instead of experts."""
    own_norm: bool = True
    """Whether it has a norm before the head."""
    unannounced: bool = False
    """Whether checkpoints may have it though config.json does not say so."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Its parts ("" is the layer itself) by their prefixes in checkpoints that name them otherwise."""
    pattern: str = ""
    """Pattern of all these tensors."""
    apart: bool = False
    """See `MtpInput`."""


@dataclass(frozen=True)
class Axes:
    """How rotary embedding turns by the three positions of a picture's token: time, row and column."""

    sections: tuple[int, ...]
    """Default of `mrope_section`: pairs by axis."""
    arrangement: Arrangement = "consecutive"


@dataclass(frozen=True)
class TextPart:
    """Where a multimodal model's text is."""

    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."),)
    """Name prefixes in its checkpoints: (theirs, the text model's)."""
    images: tuple[str, ...] = ("model.visual.*",)
    """Patterns of the tensors that are left out."""
    section: str | None = None
    """Section of config.json that holds `text_config`; None: the file itself."""
    axes: Axes | None = None
    """None: a picture's tokens have positions as those of text."""


@dataclass(frozen=True)
class Decoder:
    """One family. Fields of blocks may be `FromConfig`."""

    summary: str
    """Summary of the family, for `twofold models`."""
    model_type: str
    """transformers' name; `defaults.DEFAULTS` has the family's keys by it."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Supported values of keys; the first one also if the key is missing."""
    restated: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    """Settings that files state under keys with another meaning."""
    multipliers: bool = False
    """Whether config.json has multipliers of embeddings, scores, each block's output and logits (Granite)."""
    scaled_embedding: bool | FromConfig = False
    """Whether the embedding's rows are multiplied by the root of the hidden size."""

    mixer: Mixer | None = None
    latent: bool = False
    """Whether attention is latent (`Mla`) instead of grouped-query (`Gqa`)."""
    attention: Mapping[str, Any] = field(default_factory=dict)
    """Parts of `Gqa` or `Mla` that config.json does not set, see `blocks.block.changed`."""
    windowed: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of layers with a sliding window."""
    slides: Callable[[Settings, int], bool] = lambda settings, layer: False
    """Whether a layer has a sliding window if there is no `layer_types`."""
    of_layer: Callable[[Settings, int, Any], Any] = same
    """A layer's attention, from that of its kind."""
    rotated_share: float | None = None
    """Default share of a head that is rotated; None: whole heads alone are."""
    stretched: bool = False
    """Whether a fixed `alpha` stretches the rotation's base."""
    pools: str = ""
    """Key of the positions of an indexer's pools, for which there is a further rotation; "": there are none."""
    local_theta: float | None = None
    """RoPE base of layers with a window if `rope_parameters` has no section for them; None: that of the others."""
    learned_rope: bool = False
    """Whether checkpoints have learned factors of the rotation's frequencies."""
    thetas: str = ""
    """Key of the layers' RoPE bases, 0 of a layer without rotation; "": all have one base."""
    indexer: Rotation | None = None
    """Rotation of latent attention's indexer; None: it has none."""
    indexer_parts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Indexer` that config.json does not set; `rank` None: it reads no low-rank queries."""

    ngrams: bool = False
    """Whether layers may begin with n-gram embeddings, see `models.ngrams`."""
    residual: Residual | Callable[[Fields], Residual] = field(default_factory=Residual)
    """How outputs of both parts get into the residual stream, or how config.json says it."""
    dense: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DenseFfn` that config.json does not set."""
    router: Mapping[str, Any] | None = field(default_factory=dict)
    """Fields of `Router` that config.json does not set; None: no layer has experts."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SharedExperts` that config.json does not set."""
    inner: str = "moe_intermediate_size"
    """Key of the experts' intermediate size."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the routed experts that config.json does not set."""
    kind_of_router: type[Router] = Router
    kind_of_experts: type[RoutedExperts] = RoutedExperts
    final_norm: bool = True
    """Whether a norm comes before the head."""
    mtp: MtpLayer | None = None
    """The layer that predicts the token after the next one; None: where there is one, it cannot be run."""

    text: TextPart | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    """See `ModelConfig.renamed`."""
    left_out: tuple[tuple[str, str], ...] = ()
    """See `ModelConfig.left_out`."""
    gguf: Callable[[GgufMetadata], dict[str, Any]] = lambda metadata: {}
    """Settings of a GGUF file beyond those that all families have."""
    gguf_whole: Callable[[GgufMetadata], dict[str, Any]] | None = None
    """All settings of a GGUF file, of a family with other blocks than grouped-query attention."""
    gguf_score: Score | None = None
    """The router's score as GGUF files number it, if not by its name."""
    gguf_period: int | None = None
    """Layers of which one has no window, in a GGUF file that does not say so; None: as `slides`."""
    gguf_full_first: bool = False
    """Whether that layer is the first of them, not the last."""

    @property
    def uneven(self) -> bool:
        """Whether layers may have attention of different sizes."""
        return self.of_layer is not same
