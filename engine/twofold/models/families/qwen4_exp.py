"""Qwen3.8-Flash-Next (`qwen4_exp`). Reference: transformers `models/qwen4_exp`.

Gated delta nets and gated attention as in Qwen3.5, over several residual streams instead of norms. An indexer chooses
the positions that attention reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.pooled_indexer import PooledIndexer
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.selection import Chosen
from twofold.blocks.gated_delta import GatedDelta
from twofold.blocks.gqa import Gqa
from twofold.blocks.ngram_hash import drawn_hash
from twofold.blocks.residual import Streams
from twofold.blocks.stream_mixes import GatedStreams
from twofold.models.decoder import FULL, MtpLayer
from twofold.models.families.recurrent import DELTA, QWEN3_5_MOE, qwen_gguf, read_delta
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import Settings
from twofold.weights.json_file import Fields

_POOLS: Final = "indexer_compress_ratio"
_INDEXED: Final = "indexed_attention"
_SEED: Final = 1234
"""The default of the n-grams' hashes, which GGUF files do not state."""
_MTP: Final = {
    "mtp.fc_embedding.": "fc_embedding.", "mtp.fc_hidden.": "fc_hidden.", "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.", "mtp.hyper_connection_mixer.": "hyper_connection_mixer.", "mtp.layers.0.": "",
}  # fmt: skip


def _restated(fields: Fields) -> dict[str, Any]:
    """transformers writes another name for layers with an indexer than published files do."""
    kinds = fields.data.get("layer_types")
    if not isinstance(kinds, list):
        return {}
    return {"layer_types": [FULL if kind == _INDEXED else kind for kind in kinds]}


def _read_delta(fields: Fields) -> GatedDelta:
    kind = fields.text("output_gate_type", fields.text("hidden_act", "silu"))
    if kind not in ("sigmoid", "silu"):
        raise fields.error("output_gate_type", kind, "'sigmoid' or 'silu'")
    gate = Gate("z", activation="sigmoid" if kind == "sigmoid" else "silu")
    return replace(read_delta(fields), normed=False, gate=gate)


def _choosing(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    """The attention with its indexer."""
    fields = settings.fields
    fields.only("indexer_kv_heads", 1)
    pool, budget = fields.integer(_POOLS), fields.integer("indexer_budget")
    if budget % pool:
        raise fields.error("indexer_budget", budget, f"a multiple of {_POOLS}, which is {pool}")
    indexer = PooledIndexer(
        num_heads=fields.integer("indexer_n_heads"),
        head_dim=fields.integer("indexer_head_dim"),
        pool=pool,
        most_pools=budget // pool,
        eps=attention.eps,
        rotation=attention.rotation or Rotation(),
        pool_rotation=Rotation(index=1),
    )
    return replace(attention, select=Chosen(indexer.most, indexer))


def _streams(fields: Fields) -> Streams:
    mix = GatedStreams(
        num_streams=fields.integer("hc_count", minimum=2),
        hidden_size=fields.integer("hidden_size"),
        rank=fields.integer("hc_lowrank"),
        eps=fields.number("rms_norm_eps", above=True),
        zero_centred=not fields.boolean("values_of_gguf", False),
    )
    return Streams(
        mix,
        attention=("attn_hyper_connection", "hc_attn_"),
        feed_forward=("mlp_hyper_connection", "hc_ffn_"),
        head=("model.hyper_connection_mixer.", "output_hc_"),
        predicting_head=("model.layers.{}.hyper_connection_mixer.", "blk.{}.nextn.hc_head_"),
    )


def _ngrams_of_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """n-gram embeddings, whose hashes files state, not the seed that they are drawn from."""
    fields, file = metadata.fields, metadata.file

    def listed(key: str) -> tuple[int, ...]:
        value = file.fields.get(f"{file.fields['general.architecture']}.ple.{key}")
        numbers = np.ravel([] if value is None else value)
        if numbers.size and numbers.dtype.kind not in "ui":
            raise fields.error(f"ple.{key}", numbers.tolist()[:8], "integers")
        return tuple(map(int, numbers))

    layers, sizes, multipliers = (listed(key) for key in ("layers", "head_vocab_sizes", "layer_multipliers"))
    table, embedding = (file.tensors.get(f"{name}.weight") for name in ("per_layer_token_embd", "token_embd"))
    if not layers or table is None or embedding is None:
        return {}
    ngram_size = fields.integer("ple.ngram_size", minimum=2, maximum=64)
    heads, end = fields.integer("ple.heads_per_ngram"), fields.integer("ple.eos_token_id", minimum=0)
    if len(sizes) != (ngram_size - 1) * heads or not 0 < min(sizes) <= max(sizes) < 2**40:
        raise fields.error("ple.head_vocab_sizes", sizes[:8], f"{(ngram_size - 1) * heads} numbers of rows")
    drawn = drawn_hash(
        table=0,
        ngram_size=ngram_size,
        heads=heads,
        vocab_size=embedding.shape[0],
        least_rows=sizes[0],
        seed=_SEED,
        end_token=end,
    )
    if len(layers) > 1 or (drawn.multipliers, drawn.sizes) != (multipliers, sizes):
        raise fields.error("ple.layer_multipliers", multipliers[:8], f"one layer's, drawn from seed {_SEED}")
    return {
        "ple_layer_ids": [layer + 1 for layer in layers],
        "ple_embed_dim": len(sizes) * fields.integer("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": fields.integer("ple.conv_kernel"),
        "ngram_size": ngram_size,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": sizes[0],
        "make_ngram_vocab_size_divisible_by": table.shape[0],
        "split_ngram_parts": 1,
        "seed": _SEED,
        "ple_eos_token_id": end,
    }


def _gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Layers with an indexer are those with a compression ratio."""
    fields = metadata.fields
    ratios = {ratio for ratio in metadata.of_layers("attention.compress_ratios") if ratio}
    if len(ratios) != 1:
        raise fields.error("attention.compress_ratios", sorted(ratios), "one number above 0")
    return (
        qwen_gguf(metadata)
        | _ngrams_of_gguf(metadata)
        | {
            "tiled_value_heads": True,
            "output_gate_type": "sigmoid",
            "hc_count": fields.integer("hyper_connection.count"),
            "hc_lowrank": fields.integer("hyper_connection.low_rank"),
            "indexer_n_heads": fields.integer("attention.indexer.head_count"),
            "indexer_head_dim": fields.integer("attention.indexer.key_length"),
            "indexer_budget": fields.integer("attention.indexer.top_k"),
            _POOLS: ratios.pop(),
        }
    )


QWEN4_EXP: Final = {
    "qwen4_exp": replace(
        QWEN3_5_MOE,
        summary="Qwen3.8-Flash-Next: Qwen3.5's blocks over several residual streams, with an indexer that chooses "
                "pools of positions.",
        model_type="qwen4_exp_text",
        only={},
        restated=_restated,
        mixer=replace(DELTA, read=_read_delta),
        attention={**QWEN3_5_MOE.attention, "project": {"normed": False}},
        of_layer=_choosing,
        pools=_POOLS,
        ngrams=True,
        residual=_streams,
        router={"norm": None},
        final_norm=False,
        mtp=MtpLayer(own_norm=False, unannounced=True, renamed=_MTP, pattern="mtp.*", apart=True),
        gguf_whole=_gguf,
    ),
}  # fmt: skip
