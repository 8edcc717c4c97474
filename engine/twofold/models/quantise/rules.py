"""Which format which tensors get: a rule file in YAML, or one format for all.

    format: int4                  # what no rule names
    rules:                        # of several that fit, the last counts
      - blocks: attention
        format: bf16
      - layers: [first, last]     # numbers, "3-7", first, last
        format: q8_0
      - blocks: experts
        tensors: "*.down_proj"    # of names without .weight
        format: q6_k
      - blocks: [embedding, head] # q8_0 unless a rule names them
        format: bf16

Routers' gates, norms and biases stay as they are whatever a rule says.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from twofold.api.errors import ConfigError
from twofold.weights.tensor_spec import TensorSpec
from twofold.weights.weight_format import FORMATS

KINDS: Final = ("attention", "experts", "shared_experts", "dense", "embedding", "head")
"""Blocks that rules may name."""
HEAD_FORMAT: Final = "q8_0"
_OUTER: Final = ("embedding", "head")
_MAX_FILE_BYTES: Final = 1024 * 1024
_KEYS: Final = ("blocks", "layers", "tensors", "format")


@dataclass(frozen=True)
class Rule:
    """What it says nothing about is None and fits everything."""

    format: str
    blocks: frozenset[str] | None = None
    layers: tuple[tuple[int, int], ...] | None = None
    """Ranges, first and last included; negative ones count from the end."""
    tensors: str | None = None

    def fits(self, kind: str, layer: int | None, num_layers: int, name: str) -> bool:
        """`layer`: None for the embedding and the head, which only a rule that names them is for."""
        if self.blocks is not None and kind not in self.blocks:
            return False
        if kind in _OUTER and self.blocks is None:
            return False
        if self.layers is not None and (layer is None or not self._has_layer(layer, num_layers)):
            return False
        return self.tensors is None or fnmatch.fnmatchcase(name.removesuffix(".weight"), self.tensors)

    def _has_layer(self, layer: int, num_layers: int) -> bool:
        ranges = ([at if at >= 0 else num_layers + at for at in ends] for ends in self.layers or ())
        return any(first <= layer <= last for first, last in ranges)


@dataclass(frozen=True)
class Rules:
    """One format, and exceptions from it."""

    format: str
    rules: tuple[Rule, ...] = ()
    where: str = "--format"

    def format_of(self, kind: str, layer: int | None, num_layers: int, spec: TensorSpec) -> str:
        fitting = (rule for rule in reversed(self.rules) if rule.fits(kind, layer, num_layers, spec.name))
        rule = next(fitting, None)
        if rule is not None:
            return rule.format
        return HEAD_FORMAT if kind in _OUTER else self.format

    def check_used(self, tensors: Iterable[tuple[str, int | None, TensorSpec]], num_layers: int) -> None:
        """Raises ConfigError for a rule that fits none of these (kind, layer, tensor)."""
        known = list(tensors)
        for number, rule in enumerate(self.rules, 1):
            if not any(rule.fits(kind, layer, num_layers, spec.name) for kind, layer, spec in known):
                raise ConfigError(
                    f"{self.where}: rule {number} fits no tensor of this model, which has {num_layers} layers of "
                    f"{', '.join(sorted({kind for kind, _, _ in known}))}; mend or remove it"
                )

    @property
    def label(self) -> str:
        """For people, and a part of what tells one run from another."""
        return self.format if not self.rules else f"{self.format} with {len(self.rules)} rules"

    def __str__(self) -> str:
        return f"{self.format} {self.rules!r}" if self.rules else self.format


def read_rules(path: Path) -> Rules:
    """A rule file. Raises ConfigError naming the file, the rule and what is known instead."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes; give a rule file")
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    reader = _Reader(str(path))
    top = reader.mapping(data, "the file", ("format", "rules"))
    declared = top.get("rules", [])
    if not isinstance(declared, list):
        raise ConfigError(f"{path}: rules is {declared!r}, expected a list of rules")
    rules = tuple(reader.rule(each, f"rule {number}") for number, each in enumerate(declared, 1))
    return Rules(reader.format(top.get("format"), "the file"), rules, str(path))


@dataclass(frozen=True)
class _Reader:
    where: str

    def mapping(self, value: Any, what: str, keys: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{self.where}: {what} is {value!r}, expected {', '.join(keys)}")
        for key in value:
            if key not in keys:
                raise ConfigError(f"{self.where}: {what} has {key!r}; {_nearest(str(key), keys)}")
        return value

    def rule(self, value: Any, what: str) -> Rule:
        rule = self.mapping(value, what, _KEYS)
        tensors = rule.get("tensors")
        if tensors is not None and not isinstance(tensors, str):
            raise ConfigError(f"{self.where}: {what}: tensors is {tensors!r}, expected a pattern of names")
        blocks = None
        if "blocks" in rule:
            blocks = frozenset(map(str, _as_list(rule["blocks"])))
            for kind in blocks - set(KINDS):
                raise ConfigError(f"{self.where}: {what}: blocks has {kind!r}; {_nearest(kind, KINDS)}")
        layers = None
        if "layers" in rule:
            layers = tuple(self._layers(each, what) for each in _as_list(rule["layers"]))
        return Rule(self.format(rule.get("format"), what), blocks, layers, tensors)

    def format(self, value: Any, what: str) -> str:
        known = tuple(name for name, layout in FORMATS.items() if layout.quantised)
        if value not in known:
            said = f"has no format; it takes {', '.join(known)}"
            if value is not None:
                said = f"format is {value!r}; {_nearest(str(value), known)}"
            raise ConfigError(f"{self.where}: {what}: {said}")
        return str(value)

    def _layers(self, value: Any, what: str) -> tuple[int, int]:
        named = {"first": 0, "last": -1}
        if value in named:
            return named[value], named[value]
        numbers = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", str(value))
        if numbers is None:
            raise ConfigError(
                f"{self.where}: {what}: layers has {value!r}, expected a number, a range such as 3-7, first or last"
            )
        return int(numbers[1]), int(numbers[2] or numbers[1])


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _nearest(given: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(given, known, 1)
    return (
        f"did you mean {close[0]!r}? It takes {', '.join(known)}" if close else f"it takes {', '.join(known)}"
    )
