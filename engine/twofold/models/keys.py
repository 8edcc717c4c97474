"""Keys of config.json that many families share, each declared once: names, range, default, and name in GGUF files.

`KEYS` is the table; `Settings` reads a family's values with it. `defaults.py` has each family's keys and defaults.
"""

from __future__ import annotations

from collections.abc import Collection
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


@dataclass(frozen=True)
class FromConfig:
    """A block's field whose value config.json gives."""

    key: str
    default: bool | float
    """Value of a missing key. A number has to be above 0."""
    choice: tuple[Any, Any] | None = None
    """Values of the field where the key is false and where it is true; None: these."""

    def read(self, fields: Fields) -> Any:
        """The value. Raises ModelLoadError."""
        if isinstance(self.default, bool):
            value = fields.boolean(self.key, self.default)
            return value if self.choice is None else self.choice[value]
        return fields.number(self.key, self.default, above=True)


KEYS: Final = {
    "intermediate_size": Key(gguf="feed_forward_length"),
    "moe_intermediate_size": Key(gguf="expert_feed_forward_length"),
    "num_experts": Key(
        also=("num_local_experts", "n_routed_experts", "moe_num_experts"),
        gguf="expert_count",
        maximum=MAX_EXPERTS,
    ),
    "num_experts_per_tok": Key(also=("moe_topk", "moe_k", "top_k_experts"), gguf="expert_used_count"),
    "num_shared_experts": Key(
        0, ("n_shared_experts", "moe_num_shared_experts"), "expert_shared_count", 0, minimum=0
    ),
    "shared_expert_intermediate_size": Key(
        0, ("shared_intermediate_size",), "expert_shared_feed_forward_length", 0, minimum=0
    ),
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
    "sliding_window": Key(gguf="attention.sliding_window", minimum=0),
    "max_window_layers": Key(minimum=0),
    "num_key_value_heads": Key(also=("num_attention_groups",)),
    "num_nextn_predict_layers": Key(0, ("num_mtp_layers", "num_mtp_modules"), minimum=0),
    "qk_rope_head_dim": Key(also=("head_dim",)),
    "index_topk": Key(2048, (), "attention.indexer.top_k"),
    "index_n_heads": Key(64, (), "attention.indexer.head_count", minimum=0),
    "index_head_dim": Key(128, (), "attention.indexer.key_length"),
}
ALSO: Final = {name: key.also for name, key in KEYS.items() if key.also}
"""Further names of keys in config.json."""


class Settings:
    """Values of `KEYS` in one file; errors are ModelLoadErrors that name the file and the key."""

    def __init__(self, fields: Fields, known: Collection[str] | None = None) -> None:
        """known: the keys that the family has, others have their default whatever the file says; None: all, as in the
        settings of a GGUF file."""
        self.fields = fields
        self.of_gguf_file = known is None
        self.known: Collection[str] = KEYS if known is None else known

    def has(self, name: str) -> bool:
        """Whether the family has the key, which need not be one of `KEYS`."""
        return self.of_gguf_file or name in self.known

    def integer(self, name: str) -> int:
        key = KEYS[name]
        default = _whole(key.default)
        if name not in self.known and default is not None:
            return default
        return self.fields.integer(name, default, minimum=key.minimum, maximum=key.maximum)

    def same(self, name: str) -> int:
        """An integer, or one for each layer that is the same in all."""
        found, value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            return self.integer(name)
        if any(each != value[0] for each in value):
            raise self.fields.error(found, value, "one number, because all layers have the same here")
        return self._instead(found, value[0]).integer(name)

    def first(self, name: str) -> int:
        """An integer, or the first of a list of them: of text, where others are of images."""
        found, value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            return self.integer(name)
        return self._instead(found, value[0]).integer(name)

    def last(self, name: str) -> int:
        """As `first`, of images."""
        found, value = self.fields.get(name)
        if not isinstance(value, list) or not value:
            return self.integer(name)
        return self._instead(found, value[-1]).integer(name)

    def optional(self, name: str) -> int | None:
        """An integer; None if it is null, or missing without a default."""
        if name not in self.known or self.fields.is_null(name) or self.fields.get(name)[1] is None:
            return None
        return self.integer(name)

    def number(self, name: str) -> float:
        key = KEYS[name]
        if name not in self.known and key.default is not None:
            return key.default
        return self.fields.number(name, key.default)

    def boolean(self, name: str) -> bool:
        default = bool(KEYS[name].default)
        return default if name not in self.known else self.fields.boolean(name, default)

    def _instead(self, name: str, value: object) -> Settings:
        changed = self.fields.with_data({**self.fields.data, name: value})
        return Settings(changed, None if self.of_gguf_file else self.known)


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
