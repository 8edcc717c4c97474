"""Learned indexers of latent attention, from config.json: their sizes, and the layers that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.indexer import Indexer
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.selection import Chosen
from twofold.blocks.mla import Mla
from twofold.models.config_json import num_layers_of
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import Settings, of_gguf

_KINDS: Final = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


def chosen_by_indexer(
    settings: Settings, attention: Mla, rotation: Rotation, changes: Mapping[str, Any]
) -> Chosen | None:
    """Selection of layers that have an indexer. None: the file has none, and the context ends at `index_topk`."""
    heads, most = settings.integer("index_n_heads"), settings.integer("index_topk")
    if heads == 0:
        return None
    if attention.q_lora_rank is None and "rank" not in changes:
        raise settings.fields.error(
            "q_lora_rank", None, "an integer, because the indexer reads low-rank queries"
        )
    indexer = Indexer(
        num_heads=heads,
        head_dim=settings.integer("index_head_dim"),
        most=most,
        rank=attention.q_lora_rank,
        eps=attention.eps,
        rank_eps=attention.latent_eps,
        rotation=rotation,
    )
    return Chosen(most, replace(indexer, **changes))


def shared_layers(settings: Settings) -> set[int]:
    """Layers that attend to the positions which the last layer with an indexer chose."""
    fields = settings.fields
    layers = range(num_layers_of(fields))
    if not settings.has("indexer_types"):
        return set()
    key = next((each for each in ("indexer_types", "index_topk_pattern") if fields.data.get(each)), None)
    if key is None:
        period = max(fields.integer("index_topk_freq", 1), 1)
        offset = fields.integer("index_skip_topk_offset", 2)
        return {n for n in layers if max(n - offset + 1, 0) % period}
    kinds = fields.data[key]
    if (
        not isinstance(kinds, str | list)
        or len(kinds) < len(layers)
        or any(not isinstance(kind, str) or kind not in _KINDS for kind in kinds)
        or _KINDS[kinds[0]] != "full"
    ):
        raise fields.error(
            key, kinds, f"'full' or 'shared' for each of {len(layers)} layers, the first one full"
        )
    return {n for n in layers if _KINDS[kinds[n]] == "shared"}


def indexer_of_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """An indexer's settings in a GGUF file; without heads if the file has no indexer's tensors."""
    found = [f"blk.{n}.indexer.attn_k.weight" in metadata.file.tensors for n in range(metadata.num_layers)]
    if not any(found):
        return {"index_n_heads": 0, **of_gguf(metadata.fields, "index_topk")}
    sizes = of_gguf(metadata.fields, "index_topk", "index_n_heads", "index_head_dim")
    return sizes | {"indexer_types": ["full" if each else "shared" for each in found]}
