"""`adapter_config.json` of a PEFT adapter: the scale of each module, and refusals of what is not computed.

References: peft `tuners/lora/config.py`, `tuners/lora/model.py` (rank and alpha patterns), `utils/other.py`
(`get_pattern_key`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twofold.weights.json_file import Fields, read_json_object

CONFIG_FILE: Final = "adapter_config.json"
_MOST_PATTERNS: Final = 32
_MOST_REPEATS: Final = 3
"""Limits of regular expressions in a file: each repeat multiplies the time of a match by the name's length."""
_PLAIN: Final = re.compile(r"[\w.]+\$?")
_NESTED: Final = re.compile(r"[)}*+]\s*[*+{]")
_VARIANTS: Final = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "use_qalora", "layer_replication", "use_bdlora", "arrow_config",
    "kasa_config", "monteclora_config", "trainable_token_indices",
)  # fmt: skip
"""Keys of variants of LoRA that are not computed; false, null and empty mean off."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract from the base's weights: such an adapter is of another base than the published one."""


@dataclass(frozen=True)
class Pattern:
    """Values by pattern of module names, as PEFT's rank_pattern and alpha_pattern: the first match counts."""

    plain: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """(place in the file, value) by the ending of a module's name."""
    expressions: tuple[tuple[int, re.Pattern[str], float], ...] = ()

    def value(self, module: str) -> float | None:
        """Value of the first pattern that matches `module`; None: no pattern does."""
        found = [self.plain[ending] for ending in _endings(module) if ending in self.plain]
        found += [(place, value) for place, expression, value in self.expressions if expression.match(module)]
        return min(found)[1] if found else None


@dataclass(frozen=True)
class PeftConfig:
    """What the reader of an adapter's tensors needs to know."""

    file: Path
    rank: int
    alpha: float
    by_root: bool
    """rsLoRA: the scale is alpha / sqrt(rank)."""
    ranks: Pattern
    alphas: Pattern
    base_name: str
    version: tuple[int, ...] | None
    """PEFT's version (major, minor, patch); None: not given, or none that was released."""
    expert_columns: str | None
    """Unsloth's lora_B_layout: rank_major or grouped_by_expert; None: not given."""
    by_unsloth: bool

    @classmethod
    def read(cls, directory: Path) -> PeftConfig:
        """Raises ModelLoadError for a damaged file, and for every setting that is not computed."""
        file = directory / CONFIG_FILE
        fields = Fields(str(file), read_json_object(file, "settings of a LoRA adapter"))
        _refuse_variants(fields)
        found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", fields.text("peft_version", ""), re.ASCII)
        columns = fields.text("lora_B_layout", "") or None
        if columns not in (None, "rank_major", "grouped_by_expert"):
            raise fields.error("lora_B_layout", columns, "rank_major or grouped_by_expert")
        mapping = fields.section("auto_mapping")
        return cls(
            file=file,
            rank=fields.integer("r"),
            alpha=fields.number("lora_alpha"),
            by_root=fields.boolean("use_rslora", False),
            ranks=_pattern(fields, "rank_pattern", minimum=1),
            alphas=_pattern(fields, "alpha_pattern", minimum=0),
            base_name=fields.text("base_model_name_or_path", ""),
            version=tuple(map(int, found.groups())) if found else None,
            expert_columns=columns,
            by_unsloth=bool(mapping and mapping.data.get("unsloth_fixed")),
        )

    def rank_of(self, module: str) -> int:
        """Rank of a module's product."""
        value = self.ranks.value(module)
        return self.rank if value is None else int(value)

    def scale(self, module: str) -> float:
        """Factor of a module's product."""
        alpha, rank = self.alphas.value(module), self.rank_of(module)
        return (self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.by_root else rank)


def _endings(module: str) -> Iterator[str]:
    """A module's name, and what follows each of its dots."""
    while True:
        yield module
        _, dot, module = module.partition(".")
        if not dot:
            return


def _refuse_variants(fields: Fields) -> None:
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise fields.error("peft_type", kind, "LORA, the only type that is computed")
    for key in _VARIANTS:
        value = fields.data.get(key)
        if value not in (None, False, [], {}):
            raise fields.error(key, value, "none: this variant of LoRA is not computed")
    fields.only("bias", "none")
    start = fields.data.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise fields.error(
            "init_lora_weights",
            start,
            "an initialisation that keeps the base's weights: save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion",
        )


def _pattern(fields: Fields, key: str, *, minimum: int) -> Pattern:
    section = fields.section(key)
    plain: dict[str, tuple[int, float]] = {}
    expressions: list[tuple[int, re.Pattern[str], float]] = []
    for place, name in enumerate(section.data if section else ()):
        assert section is not None
        value: float = (
            section.integer(name) if key == "rank_pattern" else section.number(name, minimum=minimum)
        )
        if _PLAIN.fullmatch(name):
            plain.setdefault(name.removesuffix("$"), (place, value))
        else:
            expressions.append((place, _expression(section, name), value))
    if len(expressions) > _MOST_PATTERNS:
        raise fields.error(
            key, list(section.data if section else ()), f"at most {_MOST_PATTERNS} expressions"
        )
    return Pattern(plain, tuple(expressions))


def _expression(section: Fields, text: str) -> re.Pattern[str]:
    """A regular expression as PEFT matches it: at the end of a name, from its begin or after a dot."""
    repeats = len(re.findall(r"(?<!\\)[*+{]", text))
    if len(text) > 1000 or repeats > _MOST_REPEATS or _NESTED.search(text):
        raise section.error(
            text,
            section.data.get(text),
            f"a pattern of at most {_MOST_REPEATS} repeats, none of them of a group",
        )
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError):
        raise section.error(text, section.data.get(text), "a regular expression as the pattern") from None
