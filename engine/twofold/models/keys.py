"""Keys of config.json that many families share, each declared once: names, range, default, and name in GGUF files.

`KEYS` is the table; `Settings` reads a family's values with it. A family gives only the defaults that differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from twofold.models.config import MAX_EXPERTS
from twofold.weights.json_file import Fields


@dataclass(frozen=True)
class Key:
    """A setting; `default` is that of config.json and None if it has to be given."""

    default: int | float | bool | None = None
    also: tuple[str, ...] = ()
    """Further names in config.json, of which the first present one counts."""
    gguf: str = ""
    """Name in GGUF files, without the architecture."""
    absent: int | float | bool | None = None
    """Value of a GGUF file without the key, and of one with 0; None if it has to be given where it is read."""
    minimum: int = 1
    maximum: int = 2**31 - 1


KEYS: Final = {
    "intermediate_size": Key(gguf="feed_forward_length"),
    "moe_intermediate_size": Key(gguf="expert_feed_forward_length"),
    "num_experts": Key(
        also=("num_local_experts", "n_routed_experts", "moe_num_experts"),
        gguf="expert_count",
        maximum=MAX_EXPERTS,
    ),
    "num_experts_per_tok": Key(also=("moe_topk", "moe_k"), gguf="expert_used_count"),
    "num_shared_experts": Key(
        0, ("n_shared_experts", "moe_num_shared_experts"), "expert_shared_count", 0, minimum=0
    ),
    "shared_expert_intermediate_size": Key(0, (), "expert_shared_feed_forward_length", 0, minimum=0),
    "first_k_dense_replace": Key(0, ("num_dense_layers",), minimum=0),
    "moe_layer_freq": Key(1),
    "decoder_sparse_step": Key(1),
    "norm_topk_prob": Key(False, (), "expert_weights_norm", False),
    "routed_scaling_factor": Key(
        1.0,
        ("router_scaling_factor", "route_scale", "moe_router_scaling_factor", "moe_routed_scaling_factor"),
        "expert_weights_scale",
        1.0,
    ),
    "moe_router_logit_softcapping": Key(0.0),
    "n_group": Key(1, (), "expert_group_count", 1),
    "topk_group": Key(1, (), "expert_group_used_count", 1),
    "sliding_window": Key(gguf="attention.sliding_window"),
    "max_window_layers": Key(minimum=0),
    "index_topk": Key(2048, (), "attention.indexer.top_k"),
}


class Settings:
    """Values of `KEYS` in one file; errors are ModelLoadErrors that name the file and the key."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def integer(self, name: str) -> int:
        key = KEYS[name]
        return self.fields.integer(
            (name, *key.also), _whole(key.default), minimum=key.minimum, maximum=key.maximum
        )

    def first(self, name: str) -> int:
        """An integer, or the first of a list of them: of text, where others are of images."""
        value = self.fields.data.get(name)
        if not isinstance(value, list) or not value:
            return self.integer(name)
        return Settings(Fields(self.fields.where, {**self.fields.data, name: value[0]})).integer(name)

    def optional(self, name: str) -> int | None:
        """An integer; None if it is null, or missing without a default."""
        if name in self.fields.data and self.fields.data[name] is None:
            return None
        return None if self.fields.get((name, *KEYS[name].also))[1] is None else self.integer(name)

    def number(self, name: str) -> float:
        key = KEYS[name]
        return self.fields.number((name, *key.also), key.default)

    def boolean(self, name: str) -> bool:
        default = KEYS[name].default
        return self.fields.boolean((name, *KEYS[name].also), default if isinstance(default, bool) else None)


def of_gguf(fields: Fields, *names: str) -> dict[str, Any]:
    """Settings `names` of a GGUF file's own keys, in config.json's format. Raises ModelLoadError."""
    found: dict[str, Any] = {}
    for name in names:
        key = KEYS[name]
        if isinstance(key.default, bool):
            found[name] = fields.boolean(key.gguf, bool(key.absent))
        elif isinstance(key.default, float):
            found[name] = fields.number(key.gguf, key.absent) or key.absent
        else:
            least = 0 if key.absent is not None else key.minimum
            found[name] = (
                fields.integer(key.gguf, _whole(key.absent), minimum=least, maximum=key.maximum) or key.absent
            )
    return found


def _whole(value: float | None) -> int | None:
    return value if isinstance(value, int) else None
