"""Layers of a family that a `Decoder` describes, from config.json."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import Chosen, Window
from twofold.blocks.block import Block, changed
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.head import Embedding
from twofold.blocks.mla import Mla
from twofold.blocks.ngram_input import NgramInput
from twofold.blocks.picture_experts import PictureExperts
from twofold.blocks.post_norm import PostNorm
from twofold.blocks.residual import ATTENTION, FEED_FORWARD
from twofold.blocks.rope import RopeConfig, preserving_length
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.decoder import FULL, SLIDING, Axes, Decoder
from twofold.models.defaults import defaults_of
from twofold.models.indexers import chosen_by_indexer, shared_layers
from twofold.models.keys import FromConfig, Settings
from twofold.models.nested_config import text_fields, without_images
from twofold.models.ngrams import read_ngrams
from twofold.weights.json_file import Fields

Rotations = list[tuple[RopeConfig, int]]


def parse_config(decoder: Decoder, fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    if decoder.text is not None and _is_nested(fields):
        section = decoder.text.section
        outer = fields if section is None else fields.section(section) or fields
        fields = text_fields(outer, config_json.architecture_name(fields))
    row, of_gguf_file = defaults_of(decoder.model_type), fields.boolean("values_of_gguf", False)
    fields = fields.defaulting(row)
    fields = fields.with_data(fields.data | decoder.restated(fields))
    if "activation" not in decoder.dense:
        config_json.read_activation(fields)
    for key, values in decoder.only.items():
        fields.only(key, *values)
    layers = _Layers(decoder, Settings(fields, None if of_gguf_file else row))
    first = layers.attention(0)

    def layer(n: int) -> tuple[Block, ...]:
        blocks = layers.blocks(n)
        return tuple(map(_with_whole_norms, blocks)) if of_gguf_file else blocks

    (rope, rope_dim), *further = layers.rotations
    if decoder.text is not None and decoder.text.axes is not None:
        rope = _with_axes(rope, decoder.text.axes, fields)
    if decoder.pools:
        further.append((replace(rope, block=fields.integer(decoder.pools)), rope_dim))
    config = config_json.compose_model(fields, generation, layer, eps=first.eps, rope=rope, rope_dim=rope_dim)
    config = replace(
        config,
        further_rotations=tuple(further),
        renamed=decoder.renamed,
        left_out=(*decoder.left_out, *layers.left_out),
        embedding=_embedding(config.embedding, layers, rope_dim),
        ignored=(*config.ignored, *(() if layers.ngrams is None else layers.ngrams.tables.ignored)),
        head=replace(
            config.head,
            zero_centred=isinstance(first, Gqa) and first.zero_centred and not of_gguf_file,
            softcap=fields.optional_number("final_logit_softcapping", above=True),
            normed=decoder.final_norm,
            scale=1.0 / fields.number("logits_scaling", above=True) if decoder.multipliers else 1.0,
        ),
    )
    if decoder.text is not None:
        config = _of_text(decoder, config)
    if decoder.indexer is not None and layers.chosen is None:
        config = _without_indexer(config, layers.settings.integer("index_topk"))
    return _predicting(decoder, config, layers, of_gguf_file=of_gguf_file)


def _predicting(decoder: Decoder, config: ModelConfig, layers: _Layers, *, of_gguf_file: bool) -> ModelConfig:
    """The configuration with the layer that predicts the token after the next one, if the family has one."""
    fields = layers.fields
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    if (mtp := decoder.mtp) is None:
        return config.predicting(fields.where, count)
    return config.predicting(
        fields.where,
        max(count, mtp.unannounced),
        tuple(map(_with_whole_norms, layers.predicting)) if of_gguf_file else layers.predicting,
        own_norm=mtp.own_norm,
        renamed=mtp.renamed,
        pattern=mtp.pattern,
        apart=mtp.apart,
    )


def _embedding(embedding: Embedding, layers: _Layers, rope_dim: int) -> Embedding:
    return replace(
        embedding,
        scale=layers.embedding_scale,
        learned_pairs=rope_dim // 2 if layers.decoder.learned_rope else 0,
        layer_inputs=None if layers.ngrams is None else layers.ngrams.tables,
    )


def _with_axes(rope: RopeConfig, axes: Axes, fields: Fields) -> RopeConfig:
    section = fields.section(("rope_parameters", "rope_scaling"))
    sections = axes.sections
    if section is not None and section.get("mrope_section")[1] is not None:
        sections = section.integers("mrope_section")
        if len(sections) != len(axes.sections):
            raise section.error("mrope_section", list(sections), f"{len(axes.sections)} numbers of pairs")
        if axes.arrangement == "rows and columns in turn" and sections[0] != sections[1]:
            raise section.error("mrope_section", list(sections), "as many pairs of rows as of columns")
    return replace(rope, sections=sections, arrangement=axes.arrangement)


def _is_nested(fields: Fields) -> bool:
    """Whether the text part has a section of its own; GGUF files and classes of text models are the text part."""
    is_text_class = config_json.architecture_name(fields).endswith("ForCausalLM")
    return fields.get("hidden_size")[1] is None and ("text_config" in fields.data or not is_text_class)


def _of_text(decoder: Decoder, config: ModelConfig) -> ModelConfig:
    """The configuration without the parts of a checkpoint that are not text."""
    assert decoder.text is not None
    return without_images(config, (*decoder.text.prefixes, *decoder.renamed), *decoder.text.images)


def _without_indexer(config: ModelConfig, limit: int) -> ModelConfig:
    """The model without its indexer, with a context of `limit` positions."""
    why = (
        f"the context ends at {limit} positions: beyond index_topk the model attends to positions that an indexer "
        "chooses, and the file has none"
    )
    return replace(config, context_limit=limit, context_limit_reason=why)


class _Layers:
    """Blocks by layer."""

    def __init__(self, decoder: Decoder, settings: Settings) -> None:
        self.decoder = decoder
        self.settings = settings
        self.fields = fields = settings.fields
        self.num_layers = config_json.num_layers_of(fields)
        self.residual = decoder.residual(fields) if callable(decoder.residual) else decoder.residual
        self.multiplier = fields.number("residual_multiplier", minimum=1e-6) if decoder.multipliers else 1.0
        self.attention: Callable[[int], Gqa | Mla]
        self.rotations: Rotations
        self.chosen: Chosen | None = None
        self.left_out: tuple[tuple[str, str], ...] = ()
        self.attention, self.rotations = self._latent() if decoder.latent else self._grouped_query()
        self.mixed: set[int] = set()
        if (mixer := decoder.mixer) is not None:
            usual = mixer.layers
            self.mixer = mixer.read(fields)
            self.mixed = config_json.read_layer_types(
                fields, mixer.kind, None if usual is None else lambda n: usual(fields, n)
            )
        self.without = set(range(self.num_layers)) if decoder.router is None else dense_layers(settings)
        first = self.attention(0)
        wide = settings.integer("intermediate_size") if self.without or self._mtp_is_dense else 1
        dense = DenseFfn(0, first.hidden_size, wide, first.eps)
        self.dense = replace(dense, **self._config_values(decoder.dense))
        self.mixture = self._mixture(first) if len(self.without) < self.num_layers else ()
        self.ngrams = read_ngrams(fields, self.residual.num_streams, first.eps) if decoder.ngrams else None

    @property
    def _mtp_is_dense(self) -> bool:
        return self.decoder.mtp is not None and self.decoder.mtp.dense

    def blocks(self, n: int) -> tuple[Block, ...]:
        """Blocks of layer `n`."""
        mixer = self.mixer if n in self.mixed else self.attention(n)
        feed_forward = (self.dense,) if n in self.without else self.mixture
        last = self.residual.after_last() if n == self.num_layers - 1 else ()
        begin = self.ngrams.blocks.get(n) if self.ngrams is not None else None
        return (*(() if begin is None else (begin,)), *self._joined(mixer, feed_forward), *last)

    def _joined(self, mixer: Block, feed_forward: tuple[Block, ...]) -> tuple[Block, ...]:
        """A layer's parts, with what puts their outputs into the residual stream."""
        around = self.residual.around
        return (*around((mixer,), ATTENTION), *around(feed_forward, FEED_FORWARD))

    @property
    def predicting(self) -> tuple[Block, ...]:
        """Blocks of the layer that predicts the token after the next one; it chooses positions itself."""
        feed_forward = (self.dense,) if self._mtp_is_dense or not self.mixture else self.mixture
        attention = self.attention(self.num_layers - 1)
        if self.chosen is not None:
            attention = replace(attention, select=self.chosen)
        return (*self._joined(attention, feed_forward), *self.residual.after_predicting())

    @property
    def embedding_scale(self) -> float:
        """Factor of the embedding's rows.

        A layer's outputs are multiplied by the residual multiplier m. Every layer reads the residual stream through a
        norm, so dividing the embeddings by m and the norms' epsilon by m² is equivalent.
        """
        scaled = self._config_values({"scaled": self.decoder.scaled_embedding})["scaled"]
        scale = self.fields.integer("hidden_size") ** 0.5 if scaled else 1.0
        if self.decoder.multipliers:
            scale = self.fields.number("embedding_multiplier", above=True) / self.multiplier
        return scale

    def _config_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a block, those that config.json gives among them."""

        def value(each: Any) -> Any:
            if isinstance(each, Mapping):
                return {name: value(inner) for name, inner in each.items()}
            return each.read(self.fields) if isinstance(each, FromConfig) else each

        return {name: value(each) for name, each in values.items()}

    def _latent(self) -> tuple[Callable[[int], Mla], Rotations]:
        """Latent attention; YaRN's mscale is in its scale."""
        fields = self.fields
        rope = config_json.read_rope(fields, partial=self.decoder.rotated_share is not None)
        nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        mscale = (
            0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor) + 1.0 if rope.kind == "yarn" else 1.0
        )
        attention = Mla(
            layer=0,
            hidden_size=fields.integer("hidden_size"),
            num_heads=fields.integer("num_attention_heads"),
            q_lora_rank=fields.optional_integer("q_lora_rank") or None,
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=nope_dim,
            qk_rope_head_dim=rope_dim,
            v_head_dim=fields.integer("v_head_dim"),
            eps=fields.number("rms_norm_eps", above=True),
            scores=Scores(float((nope_dim + rope_dim) ** -0.5 * mscale**2)),
            bias=fields.boolean("attention_bias", False),
        )
        attention = changed(attention, self._config_values(self.decoder.attention))
        of_layer, settings, rotations = self.decoder.of_layer, self.settings, [(rope, rope_dim)]
        if self.decoder.indexer is None:
            return lambda n: of_layer(settings, n, attention), rotations
        parts = self._config_values(self.decoder.indexer_parts)
        self.chosen = chosen = chosen_by_indexer(settings, attention, self.decoder.indexer, parts)
        if chosen is None:
            return lambda n: of_layer(settings, n, attention), rotations
        shared = shared_layers(settings)
        unused = "the indexer of a layer that shares an earlier one's positions"
        self.left_out = tuple((unused, f"model.layers.{n}.self_attn.indexer.*") for n in sorted(shared))
        full, reading = replace(attention, select=chosen), replace(attention, select=Chosen(chosen.most))
        return lambda n: of_layer(settings, n, reading if n in shared else full), rotations

    def _grouped_query(self) -> tuple[Callable[[int], Gqa], Rotations]:
        """Attention of each layer, and the rotations that it refers to."""
        decoder, settings, fields = self.decoder, self.settings, self.fields
        full = changed(config_json.read_attention(fields), self._config_values(decoder.attention))
        if (scalar := fields.optional_number("query_pre_attn_scalar", above=True)) is not None:
            full = changed(full, {"scores": {"scale": scalar**-0.5}})
        if "attn_logit_softcapping" in defaults_of(
            decoder.model_type
        ):  # others' files have it without effect
            softcap = fields.optional_number("attn_logit_softcapping", above=True)
            full = changed(full, {"scores": {"softcap": softcap or 0.0}})
        if decoder.multipliers:
            multiplier = fields.optional_number("attention_multiplier", above=True)
            full = changed(full, {"eps": full.eps / self.multiplier**2, "scores": {"scale": multiplier}})
        windows = self._windows()
        rotations = [self._rotation(FULL if len(windows) < self.num_layers else SLIDING, full)]
        if full.norms.qk == "late":
            rope, scaling = preserving_length(rotations[0][0])
            rotations = [(rope, rotations[0][1])]
            full = changed(full, {"norms": {"eps": full.eps / scaling**2}})
        window = settings.optional("sliding_window") or None
        if windows and window is None:
            raise fields.error("sliding_window", None, "an integer, because some layers have such a window")
        sliding = changed(full, decoder.windowed)
        if window is not None:
            sliding = replace(sliding, select=Window(window, bidirectional=sliding.select.bidirectional))
        own = self._rotation(SLIDING, sliding) if windows else rotations[0]
        if own != rotations[0] and sliding.rotation is not None:
            rotations.append(own)
            sliding = changed(sliding, {"rotation": {"index": 1}})
        turned = self._with_rotation(rotations)
        return (
            lambda n: decoder.of_layer(settings, n, turned(n, sliding if n in windows else full)),
            rotations,
        )

    def _windows(self) -> set[int]:
        """Layers with a sliding window."""
        usual = functools.partial(self.decoder.slides, self.settings)
        if self.decoder.mixer is not None or not self.settings.has("layer_types"):
            return set(filter(usual, range(self.num_layers)))
        return config_json.read_layer_types(self.fields, SLIDING, usual)

    def _rotation(self, kind: str, attention: Gqa) -> tuple[RopeConfig, int]:
        """Rotation of the layers of a kind."""
        decoder, own = self.decoder, self.fields
        if self.settings.has("layer_types"):
            own = config_json.rope_fields_of(own, kind)
        if kind == SLIDING and decoder.local_theta is not None and own is self.fields:
            theta = own.number("rope_local_base_freq", decoder.local_theta, above=True)
            return RopeConfig(theta=theta), attention.head_dim
        share, dim = decoder.rotated_share, attention.head_dim
        partial = share is not None or self.settings.of_gguf_file
        if partial:
            dim = config_json.read_rotary_dim(own, dim, share or 1.0)
        return config_json.read_rope(own, partial=partial, ntk_dim=dim if decoder.stretched else None), dim

    def _with_rotation(self, rotations: Rotations) -> Callable[[int, Gqa], Gqa]:
        """A layer's attention with the rotation that it has if each layer states its base, added to `rotations`."""
        key, (rope, rope_dim) = self.decoder.thetas, rotations[0]
        listed = self.fields.data.get(key) if key else None
        if listed is None:
            return lambda n, attention: attention
        numbers = isinstance(listed, list) and all(
            isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < 1e30
            for each in listed
        )
        if not numbers or len(listed) != self.num_layers:
            raise self.fields.error(key, listed, f"0 or a base for each of {self.num_layers} layers")
        bases = list(dict.fromkeys((rope.theta, *(float(each) for each in listed if each))))
        rotations += [(replace(rope, theta=theta), rope_dim) for theta in bases[1:]]
        turned = [Rotation(bases.index(float(each))) if each else None for each in listed]
        return lambda n, attention: replace(attention, rotation=turned[n])

    def _mixture(self, attention: Gqa | Mla) -> tuple[Block, ...]:
        """Router, shared experts and routed experts."""
        settings, decoder, hidden = self.settings, self.decoder, attention.hidden_size
        inner = settings.first(decoder.inner)
        router = decoder.kind_of_router(
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
            group_score="top_two_sum" if "n_group" in defaults_of(decoder.model_type) else "max",
        )
        router = replace(router, **self._config_values(decoder.router or {}))
        width = settings.integer("shared_expert_intermediate_size")
        width = width or (settings.optional("num_shared_experts") or 0) * inner
        shared = (SharedExperts(0, hidden, width, **self._config_values(decoder.shared)),) if width else ()
        routed = decoder.kind_of_experts(0, hidden, router.num_experts, router.top_k, inner)
        if isinstance(routed, PictureExperts):
            routed = replace(routed, picture_size=settings.last(decoder.inner))
        return (router, *shared, replace(routed, **self._config_values(decoder.experts)))


def _with_whole_norms(block: Block) -> Block:
    """The block with norms as converters write them: 1 is added already."""
    if isinstance(block, Gqa | DenseFfn | NgramInput | Router | PostNorm):
        return replace(block, zero_centred=False)
    return block


def dense_layers(settings: Settings) -> set[int]:
    """Layers without experts, by whichever of the keys for it config.json has."""
    fields = settings.fields
    num_layers = config_json.num_layers_of(fields)
    kinds = fields.data.get("mlp_layer_types") if settings.has("mlp_layer_types") else None
    if kinds is not None:
        is_list = isinstance(kinds, list) and len(kinds) >= num_layers
        if not is_list or any(kind not in ("dense", "sparse") for kind in kinds[:num_layers]):
            raise fields.error(
                "mlp_layer_types", kinds, f"'dense' or 'sparse' for each of {num_layers} layers"
            )
        return {n for n in range(num_layers) if kinds[n] == "dense"}
    listed = fields.integers("mlp_only_layers") if settings.has("mlp_only_layers") else ()
    first = settings.integer("first_k_dense_replace")
    step, every = settings.integer("decoder_sparse_step"), settings.integer("moe_layer_freq")
    return {n for n in range(num_layers) if n in listed or n < first or (n + 1) % step or n % every}
