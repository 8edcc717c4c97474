"""dots3-note, its text: latent attention of two kinds, one with an indexer, one with a window and sizes of its own.

Reference: transformers `models/dots3_note`. Queries and latents are scaled after their norms; the score and the norm's
weights have these factors. Each head's output has a gate, and the shared key a norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.rotation import PAIRED, Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, Window
from twofold.blocks.block import Block
from twofold.blocks.mla import Mla
from twofold.blocks.rope import RopeConfig
from twofold.models import config_json, decoder_layers
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.decoder import FULL, SLIDING, Decoder, TextPart
from twofold.models.defaults import defaults_of
from twofold.models.families.grouped_query import SIGMOID
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import FromConfig, of_gguf
from twofold.models.nested_config import text_fields
from twofold.weights.json_file import Fields

INDEXED: Final = "indexed_attention"
_SLIDING_SIZES: Final = {
    "num_attention_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256, "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}  # fmt: skip
"""Sizes of layers with a window, with their defaults."""
_THETAS: Final = {INDEXED: 80_000_000.0, FULL: 80_000_000.0, SLIDING: 50_000.0}


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer, under transformers' names. Published files call layers with an indexer full."""
    layers, kinds = range(config_json.num_layers_of(fields)), fields.data.get("layer_types")
    own = fields.data.get("use_dsa", None if "per_layer_config" in fields.data else True)
    if kinds is None:
        slides = fields.boolean("use_sliding_window", True)
        kinds = [INDEXED if not slides or n < 2 or n % 4 == 1 else SLIDING for n in layers]
    known = isinstance(kinds, list) and all(isinstance(kind, str) and kind in _THETAS for kind in kinds)
    if not known or len(kinds) != len(layers):
        raise fields.error(
            "layer_types", kinds, f"{INDEXED!r} or {SLIDING!r} for each of {len(layers)} layers"
        )
    renamed = {} if own is None else {FULL: INDEXED} if own else {INDEXED: FULL}
    return [renamed.get(kind, kind) for kind in kinds]


def _rope(fields: Fields, kind: str) -> RopeConfig:
    """Rotation of the layers of a kind."""
    own = config_json.rope_fields_of(fields, kind)
    key = "swa_rope_theta" if kind == SLIDING else "rope_theta"
    theta = fields.number(key, _THETAS[kind], above=True)
    return config_json.read_rope(own.with_data(own.data | {"rope_theta": theta}), partial=True)


def _restated(fields: Fields) -> dict[str, Any]:
    data: dict[str, Any] = {}
    frequency = fields.data.get("moe_layer_freq")
    if fields.data.get("mlp_layer_types") is None and isinstance(frequency, list):
        first = fields.integer("first_k_dense_replace", 1, minimum=0)
        sparse = [n >= first and bool(each) for n, each in enumerate(frequency)]
        data["mlp_layer_types"] = ["sparse" if each else "dense" for each in sparse]
    key = ("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size")
    width = fields.integer(key, 1536, minimum=1) * fields.integer("n_shared_experts", 1, minimum=1)
    kind = next((kind for kind in _kinds(fields) if kind != SLIDING), INDEXED)
    section = config_json.rope_fields_of(fields, kind).data.get("rope_parameters")
    theta = fields.number("rope_theta", _THETAS[kind], above=True)
    return data | {
        "shared_expert_intermediate_size": width, "rope_parameters": section, "rope_theta": theta, "rope_scaling": None,
    }  # fmt: skip


_DECODER: Final = Decoder(
    "dots3-note, its text: latent attention with an indexer, or with a window and other sizes; gates of heads.",
    "dots3_note_text",
    only={"mlp_bias": (False, None)},
    restated=_restated,
    latent=True,
    attention={
        "key_norm": True, "gate": Gate("g_proj", "head"), "latent_eps": FromConfig("rms_norm_eps", 1e-5),
        "rotation": PAIRED,
    },
    rotated_share=1.0,
    indexer=PAIRED,
    router=SIGMOID,
    text=TextPart(
        (("model.language_model.", "model."),),
        tuple(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_encoder", "audio_encoder", "visual")),
    ),
    left_out=(("multi-token prediction", "model.mtp.*"), ("multi-token prediction", "model.layers.46.*")),
)  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    if fields.section("text_config") is not None:
        fields = text_fields(fields, config_json.architecture_name(fields))
    config = decoder_layers.parse_config(_DECODER, fields, generation)
    fields = fields.defaulting(defaults_of(_DECODER.model_type))
    kinds = _kinds(fields)
    sliding = _sliding_sizes(fields, kinds)
    folded = fields.boolean("values_of_gguf", False)  # into the norms of GGUF files

    def of_kind(block: Block) -> Block:
        if not isinstance(block, Mla):
            return block
        kind = kinds[block.layer]
        if kind == SLIDING:
            window = fields.integer(("sliding_window", "sliding_window_size"), 512, minimum=1)
            block = replace(block, **sliding, select=Window(window), rotation=Rotation(1, neighbours=True))
        elif kind == FULL:
            block = replace(block, select=AllPositions())
        assert block.q_lora_rank is not None
        query_scale, latent_scale = (
            1.0 if folded else float((block.hidden_size / rank) ** 0.5)
            for rank in (block.q_lora_rank, block.kv_lora_rank)
        )
        scores = Scores(query_scale * block.qk_head_dim**-0.5)
        return replace(block, latent_scale=latent_scale, scores=scores)

    rotations = ((_rope(fields, SLIDING), sliding["qk_rope_head_dim"]),) if SLIDING in kinds else ()
    layers = tuple(tuple(map(of_kind, layer)) for layer in config.layers)
    return replace(config, layers=layers, further_rotations=rotations)


def _sliding_sizes(fields: Fields, kinds: list[str]) -> dict[str, Any]:
    """Sizes of layers with a window, as fields of `Mla`."""
    section = fields.section("per_layer_config")
    own = None if section is None or SLIDING not in kinds else section.section(str(kinds.index(SLIDING)))
    found: dict[str, Any] = {
        # A section has the keys alone in which it differs from the other layers.
        key: fields.integer(f"swa_{key}", default, minimum=1)
        if own is None
        else own.integer(key, fields.optional_integer(key), minimum=1)
        for key, default in _SLIDING_SIZES.items()
    }
    found["num_heads"], whole = found.pop("num_attention_heads"), found.pop("head_dim")
    found["qk_rope_head_dim"] = whole - found["qk_nope_head_dim"]
    if found["qk_rope_head_dim"] < 2:
        least = found["qk_nope_head_dim"] + 2
        raise fields.error("swa_head_dim", whole, f"at least {least}, for the rotated part of a head")
    return found


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file's header in config.json's format. Raises ModelLoadError naming file and key."""
    fields, slides = metadata.fields, metadata.slides(0)
    heads = metadata.of_layers("attention.head_count", minimum=1)[: metadata.num_layers]
    rope_dim, rank = fields.integer("rope.dimension_count"), fields.integer("attention.q_lora_rank")
    settings: dict[str, Any] = {
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": _DECODER.model_type,
        "values_of_gguf": True,
        "layer_types": [SLIDING if each else INDEXED for each in slides],
        "qk_rope_head_dim": rope_dim,
        "rope_theta": metadata.rope_parameters()["rope_theta"],
        "swa_rope_theta": fields.number("rope.freq_base_swa", above=True),
        "sliding_window": fields.integer("attention.sliding_window"),
        "moe_shared_expert_intermediate_size": metadata.shared_width or 1,
        "n_shared_experts": int(metadata.shared_width > 0),
        "intermediate_size": fields.integer("feed_forward_length"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, minimum=0),
        **metadata.experts(),
        **of_gguf(
            fields,
            "norm_topk_prob",
            "routed_scaling_factor",
            "n_group",
            "topk_group",
            "index_topk",
            "index_n_heads",
            "index_head_dim",
        ),
    }
    for kind, own, suffix in ((False, "", ""), (True, "swa_", "_swa")):
        of_kind = {number for number, slide in zip(heads, slides, strict=True) if slide == kind}
        if not of_kind:
            continue
        if len(of_kind) > 1:
            raise fields.error("attention.head_count", heads[:8], "one number in layers of a kind")
        whole = fields.integer(f"attention.key_length_mla{suffix}", minimum=rope_dim + 1)
        settings |= {
            f"{own}num_attention_heads": (count := of_kind.pop()),
            f"{own}num_key_value_heads": count,
            f"{own}q_lora_rank": rank,
            f"{own}kv_lora_rank": fields.integer(f"attention.kv_lora_rank{suffix}"),
            f"{own}qk_nope_head_dim": whole - rope_dim,
            f"{own}v_head_dim": fields.integer(f"attention.value_length_mla{suffix}"),
            f"{own}head_dim": whole,
        }
    return settings
