"""`Decoder`: a family of grouped-query attention and feed-forward layers or experts, described by its differences.

Layers are (attention, feed-forward part), either followed by its post norm where the family has them. A layer's
feed-forward part is dense, or a router, shared experts and routed experts. A family of this kind is one entry of
`families/decoders.py`, not a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.post_norm import PostNorm
from twofold.blocks.rope import RopeConfig, preserving_length
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata, Score
from twofold.models.keys import KEYS, Settings, of_gguf
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

SLIDING, FULL = "sliding_attention", "full_attention"


def _same(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    return attention


@dataclass(frozen=True)
class TextPart:
    """Where a multimodal model's text is."""

    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."),)
    """Name prefixes in its checkpoints: (theirs, the text model's)."""
    images: tuple[str, ...] = ("model.visual.*",)
    """Patterns of the tensors that are left out."""
    section: str | None = None
    """Section of config.json that holds `text_config`; None: the file itself."""
    experts_of_images: bool = False
    """Whether as many experts of images follow those of text."""


@dataclass(frozen=True)
class Decoder:
    """One family."""

    summary: str
    """What the family is, for `twofold models`."""
    model_type: str
    """transformers' name; `defaults.DEFAULTS` has the family's keys by it."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Supported values of keys; the first one also if the key is missing."""
    restated: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    """Settings that files state under keys with another meaning."""
    attention: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Gqa` that config.json does not set."""
    windowed: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of layers with a sliding window."""
    slides: Callable[[Settings, int], bool] = lambda settings, layer: False
    """Whether a layer has a sliding window if there is no `layer_types`."""
    router: Mapping[str, Any] | None = field(default_factory=dict)
    """Fields of `Router` that config.json does not set; None: no layer has experts."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `RoutedExperts` that config.json does not set."""
    shared: str = "mlp.shared_experts"
    """Module of the shared experts."""
    dense: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DenseFfn` that config.json does not set."""
    post_norms: tuple[tuple[str, str] | None, tuple[str, str] | None] = (None, None)
    """(name, GGUF name) of the norm of attention's output, and of the feed-forward part's."""
    of_layer: Callable[[Settings, int, Gqa], Gqa] = _same
    """A layer's attention, from that of its kind."""
    inner: str = "moe_intermediate_size"
    """Key of the experts' intermediate size."""
    scaled_embedding: bool | str = False
    """Whether the embedding's rows are multiplied by the root of the hidden size; or the key that says so."""
    local_theta: float | None = None
    """RoPE base of layers with a window if `rope_parameters` has no section for them; None: that of the others."""
    rotated_share: float = 1.0
    """Default share of a head that is rotated."""
    renamed: tuple[tuple[str, str], ...] = ()
    """See `ModelConfig.renamed`."""
    left_out: tuple[tuple[str, str], ...] = ()
    """See `ModelConfig.left_out`."""
    gguf: Callable[[GgufMetadata], dict[str, Any]] = lambda metadata: {}
    """Settings of a GGUF file beyond those that all families have."""
    gguf_period: int | None = None
    """Layers of which one has no window, in a GGUF file that does not say so; None: as `slides`."""
    gguf_full_first: bool = False
    """Whether that layer is the first of them, not the last."""
    text: TextPart | None = None

    def parse_config(self, fields: Fields, generation: GenerationDefaults) -> ModelConfig:
        """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
        if self.text is not None and fields.get("hidden_size")[1] is None:  # GGUF files have the text alone
            outer = fields if self.text.section is None else fields.section(self.text.section) or fields
            fields = text_fields(outer, config_json.architecture_name(fields))
        row, of_gguf_file = defaults_of(self.model_type), fields.boolean("values_of_gguf", False)
        fields = fields.with_data(fields.data | self.restated(fields)).defaulting(row)
        settings = Settings(fields, None if of_gguf_file else row)
        if "activation" not in self.dense:
            config_json.read_activation(fields)
        for key, values in self.only.items():
            fields.only(key, *values)
        layer_of, rotations = self._attention(settings)
        feed_forward = self._feed_forward(settings, layer_of(0))

        def layer(n: int) -> tuple[Block, ...]:
            blocks = (*self._normed((layer_of(n),), 0), *self._normed(feed_forward(n), 1))
            return tuple(map(_with_whole_norms, blocks)) if of_gguf_file else blocks

        (rope, rope_dim), *further = rotations
        scaled = self.scaled_embedding
        if isinstance(scaled, str):
            scaled = fields.boolean(scaled, False)
        config = config_json.compose_model(
            fields, generation, layer, eps=layer_of(0).eps, rope=rope, rope_dim=rope_dim
        )
        config = replace(
            config,
            further_rotations=tuple(further),
            renamed=self.renamed,
            left_out=self.left_out,
            embedding=replace(config.embedding, scale=config.hidden_size**0.5 if scaled else 1.0),
            head=replace(
                config.head,
                zero_centred=layer_of(0).zero_centred and not of_gguf_file,
                softcap=fields.optional_number("final_logit_softcapping", above=True),
            ),
        )
        if self.text is not None:
            count = config.num_experts if self.text.experts_of_images else 0
            of_images = (f"model.layers.*.mlp.experts.{count + n}.*" for n in range(count))
            config = without_images(
                config, (*self.text.prefixes, *self.renamed), *self.text.images, *of_images
            )
        further_layers = fields.optional_integer("num_nextn_predict_layers") or 0
        return config.predicting(fields.where, further_layers)

    def _normed(self, blocks: tuple[Block, ...], part: int) -> tuple[Block, ...]:
        """The blocks, and the norm of their sum if the family has one there."""
        names, first = self.post_norms[part], blocks[0]
        if names is None or not isinstance(first, Gqa | DenseFfn | Router):
            return blocks
        over = len(blocks)
        return (
            *blocks,
            PostNorm(0, first.hidden_size, first.eps, *names, over=over, zero_centred=first.zero_centred),
        )

    def _attention(self, settings: Settings) -> tuple[Callable[[int], Gqa], list[tuple[RopeConfig, int]]]:
        """Attention of each layer, and the rotations that it refers to."""
        fields, window = settings.fields, settings.optional("sliding_window")
        full = replace(config_json.read_attention(fields), **self.attention)
        if (scalar := fields.optional_number("query_pre_attn_scalar", above=True)) is not None:
            full = replace(full, multiplier=scalar**-0.5)
        windows = config_json.read_layer_types(fields, SLIDING, lambda n: self.slides(settings, n))
        has_full = len(windows) < config_json.num_layers_of(fields)
        rotations = [self._rotation(fields, FULL if has_full else SLIDING, full)]
        if full.late_norms:
            rope, scaling = preserving_length(rotations[0][0])
            rotations = [(rope, rotations[0][1])]
            full = replace(full, head_eps=full.eps / scaling**2)
        sliding = replace(full, sliding_window=window, **self.windowed)
        if windows and window is None:
            raise fields.error("sliding_window", None, "an integer, because some layers have such a window")
        if windows and (own := self._rotation(fields, SLIDING, sliding)) != rotations[0]:
            rotations.append(own)
            sliding = replace(sliding, rotation=1)
        return lambda n: self.of_layer(settings, n, sliding if n in windows else full), rotations

    def _rotation(self, fields: Fields, kind: str, attention: Gqa) -> tuple[RopeConfig, int]:
        own = config_json.rope_fields_of(fields, kind)
        if kind == SLIDING and self.local_theta is not None and own is fields:
            theta = fields.number("rope_local_base_freq", self.local_theta, above=True)
            return RopeConfig(theta=theta), attention.head_dim
        fields = own
        dim = config_json.read_rotary_dim(fields, attention.head_dim, self.rotated_share)
        return config_json.read_rope(fields, partial=True, ntk_dim=dim), dim

    def _feed_forward(self, settings: Settings, attention: Gqa) -> Callable[[int], tuple[Block, ...]]:
        """Blocks after attention, by layer."""
        hidden, eps = attention.hidden_size, attention.eps
        num_layers = config_json.num_layers_of(settings.fields)
        without = set(range(num_layers)) if self.router is None else dense_layers(settings)
        wide = settings.integer("intermediate_size") if without else 1
        dense = DenseFfn(0, hidden, wide, eps, **self.dense)
        mixture: tuple[Block, ...] = ()
        if len(without) < num_layers:
            mixture = self._mixture(settings, attention)
        return lambda n: (dense,) if n in without else mixture

    def _mixture(self, settings: Settings, attention: Gqa) -> tuple[Block, ...]:
        hidden, inner = attention.hidden_size, settings.first(self.inner)
        router = Router(
            layer=0,
            hidden_size=hidden,
            num_experts=settings.same("num_experts"),
            top_k=settings.same("num_experts_per_tok"),
            eps=attention.eps,
            renormalise=settings.boolean("norm_topk_prob"),
            scale=settings.number("routed_scaling_factor") or 1.0,
            softcap=settings.number("moe_router_logit_softcapping"),
            num_groups=settings.integer("n_group"),
            top_groups=settings.integer("topk_group"),
            group_score="top_two_sum",
        )
        router = replace(router, **self.router or {})
        width = settings.integer("shared_expert_intermediate_size")
        width = width or settings.integer("num_shared_experts") * inner
        shared = (SharedExperts(0, hidden, width, self.shared),) if width else ()
        return (router, *shared, replace(config_json.experts_of(router, inner), **self.experts))

    def gguf_settings(self, metadata: GgufMetadata) -> dict[str, Any]:
        """A GGUF file's header in config.json's format. Raises ModelLoadError naming file and key."""
        uneven = self.of_layer is not _same
        attention = metadata.attention(windows=True, partly_rotated=True, uneven=uneven)
        settings = {"model_type": self.model_type, "values_of_gguf": True, **attention}
        if attention["sliding_window"] is not None and (
            self.gguf_period is not None or "attention.sliding_window_pattern" in metadata.fields.data
        ):
            slides = metadata.slides(self.gguf_period or 0, full_first=self.gguf_full_first)
            settings["layer_types"] = [SLIDING if slide else FULL for slide in slides]
        if FULL in defaults_of(self.model_type).get("rope_parameters", ()):  # by kind of layer
            settings["rope_parameters"] = _rotations(metadata, attention)
        layers = range(metadata.num_layers)
        if self.router is None or not any(map(metadata.has_gate, layers)):
            return settings | of_gguf(metadata.fields, "intermediate_size") | self.gguf(metadata)
        score: Score = self.router.get("score", "softmax")
        metadata.expect_score(score)
        mixture = of_gguf(metadata.fields, *_MIXTURE)
        if mixture["shared_expert_intermediate_size"] == mixture["moe_intermediate_size"]:
            mixture["shared_expert_intermediate_size"] = 0  # the width of one of several
        mixture[self.inner] = mixture["moe_intermediate_size"]
        layers_of = {"first_k_dense_replace": 0, **metadata.dense_layers()}
        return settings | mixture | layers_of | self.gguf(metadata)


def _rotations(metadata: GgufMetadata, attention: Mapping[str, Any]) -> dict[str, Any]:
    """Rotations by kind of layer. As in llama.cpp, those of layers with a window are not scaled."""
    fields, head_dim = metadata.fields, attention["head_dim"]
    full = metadata.rope_parameters()
    theta = fields.number("rope.freq_base_swa", full["rope_theta"] or 10_000.0, above=True)
    rotated = fields.integer("rope.dimension_count", head_dim, maximum=head_dim)
    sliding = fields.integer("rope.dimension_count_swa", rotated, maximum=head_dim)
    return {
        FULL: full | {"partial_rotary_factor": config_json.rotary_share(rotated, head_dim)},
        SLIDING: {"rope_theta": theta, "partial_rotary_factor": config_json.rotary_share(sliding, head_dim)},
    }


def _with_whole_norms(block: Block) -> Block:
    """The block with norms as converters write them: 1 is added already."""
    if isinstance(block, Gqa | DenseFfn | Router | PostNorm):
        return replace(block, zero_centred=False)
    return block


_MIXTURE: Final = (
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_shared_experts",
    "shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
)  # fmt: skip


def dense_layers(settings: Settings) -> set[int]:
    """Layers without experts, by whichever of the keys for it config.json has."""
    fields = settings.fields
    num_layers, kinds = config_json.num_layers_of(fields), fields.data.get("mlp_layer_types")
    if kinds is not None:
        is_list = isinstance(kinds, list) and len(kinds) >= num_layers
        if not is_list or any(kind not in ("dense", "sparse") for kind in kinds[:num_layers]):
            raise fields.error(
                "mlp_layer_types", kinds, f"'dense' or 'sparse' for each of {num_layers} layers"
            )
        return {n for n in range(num_layers) if kinds[n] == "dense"}
    has_list = "mlp_only_layers" in settings.known or settings.known is KEYS
    listed = fields.integers("mlp_only_layers") if has_list else ()
    first = settings.integer("first_k_dense_replace")
    step, every = settings.integer("decoder_sparse_step"), settings.integer("moe_layer_freq")
    return {n for n in range(num_layers) if n in listed or n < first or (n + 1) % step or n % every}
