"""`adapter_config.json` of a PEFT adapter: the scale of each module, and refusals of what is not computed.

References: peft `tuners/lora/config.py`, `tuners/lora/model.py` (rank and alpha patterns), `utils/other.py`
(`get_pattern_key`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from twofold.adapters.settings import AdapterSettings, Pattern
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


def read_settings(directory: Path) -> AdapterSettings:
    """Settings of a directory's adapter. Raises ModelLoadError for a damaged file, and for what is not computed."""
    file = directory / CONFIG_FILE
    fields = Fields(str(file), read_json_object(file, "settings of a LoRA adapter"))
    _refuse_variants(fields)
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", fields.text("peft_version", ""), re.ASCII)
    columns = fields.text("lora_B_layout", "") or None
    if columns not in (None, "rank_major", "grouped_by_expert"):
        raise fields.error("lora_B_layout", columns, "rank_major or grouped_by_expert")
    mapping = fields.section("auto_mapping")
    return AdapterSettings(
        file=file,
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        by_root=fields.boolean("use_rslora", False),
        ranks=_pattern(fields, "rank_pattern"),
        alphas=_pattern(fields, "alpha_pattern"),
        base_name=fields.text("base_model_name_or_path", ""),
        version=tuple(map(int, found.groups())) if found else None,
        expert_columns=columns,
        by_unsloth=bool(mapping and mapping.data.get("unsloth_fixed")),
    )


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


def _pattern(fields: Fields, key: str) -> Pattern:
    section = fields.section(key)
    plain: dict[str, tuple[int, float]] = {}
    expressions: list[tuple[int, re.Pattern[str], float]] = []
    for place, name in enumerate(section.data if section else ()):
        assert section is not None
        value: float = section.integer(name) if key == "rank_pattern" else section.number(name)
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
