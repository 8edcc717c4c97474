"""Mistral Large 4: latent attention with an indexer, in which layers may share latents or carry no positions.

Reference: transformers `models/mistral_large4`. Queries have no low rank, and learned factors that grow with the
position; the rotation's frequencies have learned factors too. Published files have names of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from twofold.blocks.attention.indexer import Indexer
from twofold.blocks.attention.query_scale import HeadScale
from twofold.blocks.attention.rotation import PAIRED
from twofold.blocks.attention.selection import Chosen
from twofold.blocks.mla import Mla
from twofold.models.config_json import num_layers_of
from twofold.models.decoder import Decoder, TextPart
from twofold.models.keys import FromConfig, Settings
from twofold.weights.json_file import Fields


def _by_layer(fields: Fields, key: str, usual: list[int]) -> list[int]:
    """A number for each layer."""
    given = fields.data.get(key)
    if given is None:
        return usual
    known = isinstance(given, list) and all(type(each) in (int, bool) and each >= 0 for each in given)
    if not known or len(given) < len(usual):
        raise fields.error(key, given, f"a number for each of {len(usual)} layers")
    return [int(each) for each in given[: len(usual)]]


def _sources(fields: Fields, rotated: list[bool]) -> list[int]:
    """The layer whose latents each layer reads: itself, or the last one of its kind that shares its own."""
    layers = range(num_layers_of(fields))
    found = _by_layer(fields, "kv_source_layers", list(layers))
    shared = {source for n, source in enumerate(found) if source != n}
    for n, source in enumerate(found):
        last = next(
            (each for each in range(n - 1, -1, -1) if each in shared and rotated[each] == rotated[n]), None
        )
        if source != n and (source != last or found[source] != source):
            raise fields.error(
                "kv_source_layers",
                found,
                f"{n} or the last layer before it that others read, with or without positions as it",
            )
    return found


def _of_layer(settings: Settings, layer: int, attention: Mla) -> Mla:
    """A layer's attention: of layers without positions, whole heads are products of latents."""
    fields = settings.fields
    period = fields.integer("no_rope_layer_interval", 4, minimum=1)
    usual = [int((n + 1) % period != 0) for n in range(num_layers_of(fields))]
    rotated = [bool(each) for each in _by_layer(fields, "no_rope_layers", usual)]
    source = _sources(fields, rotated)[layer]
    attention = replace(attention, kv_layer=None if source == layer else source)
    if rotated[layer]:
        return attention
    select = attention.select
    if isinstance(select, Chosen) and isinstance(select.chooser, Indexer):
        select = replace(select, chooser=replace(select.chooser, rotation=None))
    whole = attention.qk_head_dim
    return replace(attention, qk_nope_head_dim=whole, qk_rope_head_dim=0, rotation=None, select=select)


def _twice(*modules: str) -> tuple[tuple[str, str], ...]:
    """Renames modules of a layer that are in `mlp` in some files alone."""
    out = ((f"*.mlp.{module}.", f"*.{module}.") for module in modules)
    return (*out, *((f"*.{module}.", f"*.mlp.{module}.") for module in modules))


_NAMES: Final = (
    ("model.language_model.", "model."), ("tok_embeddings.", "model.embed_tokens."), ("output.", "lm_head."),
    ("lerope.", "model.rotary_emb."),
    ("*.attention.", "*.self_attn."), ("*.wq.", "*.q_proj."), ("*.wkv_a_with_mqa.", "*.kv_a_proj_with_mqa."),
    ("*.wkv_b.", "*.kv_b_proj."), ("*.wo.", "*.o_proj."), ("*.kv_a_norm.", "*.kv_a_layernorm."),
    ("*.attention_norm.", "*.input_layernorm."), ("*.ffn_norm.", "*.post_attention_layernorm."),
    ("*.ssmax_scaling.s", "*.softmax_scaling.scale"), ("*.ssmax_scaling.b", "*.softmax_scaling.bias"),
    ("*.feed_forward.", "*.mlp."), *_twice("gate", "experts", "shared_experts"),
    ("*.w1.", "*.gate_proj."), ("*.w2.", "*.down_proj."), ("*.w3.", "*.up_proj."),
)  # fmt: skip
_IMAGES: Final = (
    "vision_encoder", "pre_mm_projector_norm", "patch_merger", "vision_language_adapter", "model.vision_tower",
    "model.multi_modal_projector",
)  # fmt: skip

_DECODER: Final = Decoder(
    "Mistral Large 4: latent attention with an indexer, queries scaled by learned factors, layers that share latents, "
    "softmax router by groups' two best experts.",
    "mistral_large4_text",
    latent=True,
    attention={
        "q_lora_rank": None, "scale": HeadScale(), "latent_eps": FromConfig("rms_norm_eps", 1e-5),
    },
    of_layer=_of_layer,
    rotated_share=1.0,
    indexer=PAIRED,
    indexer_parts={"rank": None, "rank_eps": 1e-6, "scale": HeadScale("indexer.softmax_scaling", "index_scale")},
    learned_rope=True,
    router={"renormalise": True},
    text=TextPart(_NAMES, tuple(f"{part}.*" for part in _IMAGES)),
    left_out=(("multi-token prediction", "mtp_dspark.*"),),
)  # fmt: skip
MISTRAL_LARGE4: Final = {"mistral_large4": _DECODER}
