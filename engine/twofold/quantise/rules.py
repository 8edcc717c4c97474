"""Quantisation rules: the format of each tensor, from a YAML file, or one format for all.

    format: int4                  # tensors that no rule names
    rules:                        # the last match counts
      - blocks: attention
        format: bf16
      - layers: [first, last]     # numbers, "3-7", first, last
        format: q8_0
      - blocks: experts
        tensors: "*.down_proj"    # pattern of names without .weight
        format: q6_k
      - blocks: [embedding, head] # q8_0 unless a rule names them
        format: bf16

Routers' gates, norms and biases are unchanged under any rule.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.rules.rule_parts import as_list, is_within, known_format, layer_range, mapping
from twofold.rules.yaml_file import nearest, read_yaml, short
from twofold.weights.tensor_spec import TensorSpec

KINDS: Final = ("attention", "experts", "shared_experts", "dense", "embedding", "head")
"""Block kinds that rules may name."""
HEAD_FORMAT: Final = "q8_0"
_OUTER: Final = ("embedding", "head")
_KEYS: Final = ("blocks", "layers", "tensors", "format")


@dataclass(frozen=True)
class Rule:
    """One rule; a missing criterion (None) matches everything."""

    format: str
    blocks: frozenset[str] | None = None
    layers: tuple[tuple[int, int], ...] | None = None
    """Ranges, first and last included; negative ones count from the end."""
    tensors: str | None = None

    def fits(self, kind: str, layer: int | None, num_layers: int, name: str) -> bool:
        """Whether the rule matches. `layer`: None for embedding and head, which only rules that name them match."""
        if self.blocks is not None and kind not in self.blocks:
            return False
        if kind in _OUTER and self.blocks is None:
            return False
        if self.layers is not None and (layer is None or not is_within(layer, self.layers, num_layers)):
            return False
        return self.tensors is None or fnmatch.fnmatchcase(name.removesuffix(".weight"), self.tensors)


@dataclass(frozen=True)
class Rules:
    """A default format, and exceptions from it."""

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
        """Raises ConfigError for a rule that matches none of these (kind, layer, tensor)."""
        known = list(tensors)
        for number, rule in enumerate(self.rules, 1):
            if not any(rule.fits(kind, layer, num_layers, spec.name) for kind, layer, spec in known):
                raise ConfigError(
                    f"{self.where}: rule {number} fits no tensor of this model, which has {num_layers} layers of "
                    f"{', '.join(sorted({kind for kind, _, _ in known}))}; correct or remove it"
                )

    @property
    def label(self) -> str:
        """Display name, and part of a run's identity."""
        return self.format if not self.rules else f"{self.format} with {len(self.rules)} rules"

    def __str__(self) -> str:
        return f"{self.format} {self.rules!r}" if self.rules else self.format


def read_rules(path: Path) -> Rules:
    """Read a rule file. Raises ConfigError naming the file, the rule and the known alternatives."""
    top = mapping(read_yaml(path).value, str(path), "the file", ("format", "rules"))
    declared = top.get("rules", [])
    if not isinstance(declared, list):
        raise ConfigError(f"{path}: rules is {short(declared)}, expected a list of rules")
    rules = tuple(_rule(each, str(path), f"rule {number}") for number, each in enumerate(declared, 1))
    return Rules(known_format(top.get("format"), f"{path}: the file"), rules, str(path))


def _rule(value: Any, file: str, what: str) -> Rule:
    rule, where = mapping(value, file, what, _KEYS), f"{file}: {what}"
    tensors = rule.get("tensors")
    if tensors is not None and not isinstance(tensors, str):
        raise ConfigError(f"{where}: tensors is {tensors!r}, expected a pattern of names")
    blocks = None
    if "blocks" in rule:
        blocks = frozenset(map(str, as_list(rule["blocks"])))
        for kind in blocks - set(KINDS):
            raise ConfigError(f"{where}: blocks has {kind!r}; {nearest(kind, KINDS)}")
    layers = None
    if "layers" in rule:
        layers = tuple(layer_range(each, where) for each in as_list(rule["layers"]))
    return Rule(known_format(rule.get("format"), where), blocks, layers, tensors)
