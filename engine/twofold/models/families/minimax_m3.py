"""MiniMax-M3, its text: key heads choose blocks of positions. Reference: transformers `models/minimax_m3_vl`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.block_indexer import BlockIndexer
from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.selection import Chosen
from twofold.blocks.gqa import Gqa
from twofold.models.config_json import num_layers_of
from twofold.models.decoder import FULL, Decoder, TextPart
from twofold.models.families.grouped_query import PROJECTIONS, SIGMOID
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import FromConfig, Settings, of_gguf
from twofold.weights.json_file import Fields

_SPARSE: Final = "minimax_m3_sparse"
_FREQUENCY: Final = "sparse_attention_freq"
_SIZES: Final = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block", _FREQUENCY: _FREQUENCY,
}  # fmt: skip
"""The indexer's sizes and layers by their names in `sparse_attention_config` of published files."""
_GATED: Final = {"activation": "swiglu_oai", "limit": FromConfig("swiglu_limit", 7.0)}


def _restated(fields: Fields) -> dict[str, Any]:
    """Published keys under transformers' names. `intermediate_size` is that of an expert."""
    data = dict(fields.data)
    sparse = fields.section("sparse_attention_config")
    if sparse is not None:
        data |= {key: sparse.data[own] for key, own in _SIZES.items() if own in sparse.data}
    if data.get("mlp_layer_types") is None and data.get("moe_layer_freq") is not None:
        data["mlp_layer_types"] = [
            "sparse" if each else "dense" for each in fields.integers("moe_layer_freq")
        ]
    return {
        **{key: data[key] for key in (*_SIZES, "mlp_layer_types") if key in data},
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "intermediate_size": fields.integer("dense_intermediate_size"),
    }


def _choosing(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    """The layer's attention, with the blocks that its indexer chooses if it has one."""
    fields, num_layers = settings.fields, num_layers_of(settings.fields)
    kinds = fields.data.get("layer_types")
    if kinds is None and _FREQUENCY in fields.data:
        kinds = [_SPARSE if each else FULL for each in fields.integers(_FREQUENCY)]
    kinds = kinds or [FULL] * num_layers
    known = isinstance(kinds, list) and all(kind in (_SPARSE, FULL) for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise fields.error("layer_types", kinds, f"{_SPARSE!r} or {FULL!r} for each of {num_layers} layers")
    if kinds[layer] == FULL:
        return attention
    if fields.integer("index_n_heads") != attention.num_kv_heads:
        given = fields.integer("index_n_heads")
        raise fields.error("index_n_heads", given, f"num_key_value_heads, which is {attention.num_kv_heads}")
    indexer = BlockIndexer(
        num_heads=attention.num_kv_heads,
        head_dim=fields.integer("index_head_dim", minimum=1),
        block=fields.integer("index_block_size", minimum=1),
        most_blocks=fields.integer("index_topk_blocks", minimum=1),
        local=fields.integer("index_local_blocks", minimum=0),
        eps=attention.eps,
        rotation=attention.rotation or Rotation(),
    )
    return replace(attention, select=Chosen(indexer.most, indexer))


def _gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Sizes of the indexer, and the layers that have one."""
    fields = metadata.fields
    sparse = [
        int(f"blk.{n}.indexer.k_proj.weight" in metadata.file.tensors) for n in range(metadata.num_layers)
    ]
    sizes = {}
    if any(sparse):
        sizes = {
            **of_gguf(fields, "index_n_heads", "index_head_dim"),
            "index_topk_blocks": fields.integer("attention.indexer.top_k"),
            "index_block_size": fields.integer("attention.indexer.block_size"),
            "index_local_blocks": fields.integer("attention.indexer.local_blocks", minimum=0),
        }
    if shared := metadata.shared_width:  # no key has it
        sizes |= {"num_shared_experts": 1, "shared_expert_intermediate_size": shared}
    return sizes | {
        _FREQUENCY: sparse,
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "dense_intermediate_size": fields.integer("feed_forward_length"),
    }


_FUSED: Final = ("gate_up_proj", "down_proj")
"""As transformers saves feed-forward layers."""
_VISION: Final = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")
MINIMAX_M3: Final = {
    "minimax_m3": Decoder(
        "MiniMax-M3, its text: key heads choose blocks of positions, sigmoid router, shared experts, dense layers.",
        "minimax_m3_vl_text",
        only={"swiglu_alpha": (1.702,)},
        restated=_restated,
        attention={"norms": HeadNorms(), "zero_centred": True},
        of_layer=_choosing,
        rotated_share=1.0,
        dense={"zero_centred": True, "fused": _FUSED, **_GATED},
        router=SIGMOID | {"renormalise": True, "zero_centred": True},
        shared={"fused": _FUSED, **_GATED},
        experts={"projections": PROJECTIONS, **_GATED},
        text=TextPart(
            (
                ("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""),
            ),
            tuple(f"{at}{part}.*" for at in ("", "model.") for part in _VISION),
        ),
        renamed=(
            *((f"*.self_attn.index_{part}.", f"*.self_attn.indexer.{part}.") for part in
              ("q_proj", "k_proj", "q_norm", "k_norm")),
            ("*.block_sparse_moe.e_score_correction_bias", "*.mlp.gate.e_score_correction_bias"),
            ("*.block_sparse_moe.", "*.mlp."),
        ),
        left_out=(("multi-token prediction", "*mtp.*"),),
        gguf=_gguf,
    ),
}  # fmt: skip
