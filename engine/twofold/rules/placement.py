"""`--optimize-config`: a file of placement rules, the modules that each matches, and their settings.

    - match: {class: experts, layers: [first, last]}   # or name: a regular expression; or match: all
      device: gpu                                      # cpu, gpu, auto
    - match: {name: 'mlp\\.experts$'}
      format: q8_0
      threads: 8

If several rules match a module, the first counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.rules.ktransformers import translated
from twofold.rules.modules import CLASSES, Module
from twofold.rules.rule_parts import as_list, is_within, known_format, layer_range, mapping
from twofold.rules.yaml_file import YamlFile, nearest, parse_yaml, read_yaml, short

DEVICES: Final = ("auto", "cpu", "gpu")
LEVELS: Final = ("auto", "generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
SHIPPED: Final = "shipped"
"""Value of --optimize-config for the rules that come with Twofold."""
FROM_FILE: Final = "file"
"""The format of the model's files."""
_KEYS: Final = ("match", "device", "format", "backend", "threads")
_MATCH_KEYS: Final = ("name", "class", "layers")
_MAX_RULES: Final = 1000
_MAX_PATTERN: Final = 1000
_MAX_THREADS: Final = 4096


@dataclass(frozen=True)
class PlacementRule:
    """One rule. A missing criterion (None) matches everything; a missing setting is not requested."""

    where: str
    """FILE:LINE."""
    name: re.Pattern[str] | None = None
    classes: frozenset[str] | None = None
    layers: tuple[tuple[int, int], ...] | None = None
    device: str = "auto"
    format: str | None = None
    backend: str = "auto"
    threads: int | None = None
    notes: tuple[str, ...] = ()
    """Notes about the translation of a rule in another form."""
    may_fit_none: bool = False
    """Whether a model without such modules is no error: Twofold's own rules are for every model."""

    def fits(self, module: Module, num_layers: int) -> bool:
        if self.name is not None and self.name.search(module.name) is None:
            return False
        if self.classes is not None and not self.classes & module.classes:
            return False
        if self.layers is None:
            return True
        return module.layer is not None and is_within(module.layer, self.layers, num_layers)


def read_placement_rules(name: str) -> tuple[PlacementRule, ...]:
    """Rules of a file, or with `SHIPPED` those that come with Twofold and state the defaults.

    Raises ConfigError with file, line and the known alternatives.
    """
    if name != SHIPPED:
        return parse_placement_rules(read_yaml(Path(name).expanduser()))
    file = resources.files("twofold.rules") / "shipped.yaml"
    rules = parse_placement_rules(parse_yaml(file.read_text("utf-8"), f"{SHIPPED} rules"))
    return tuple(replace(rule, may_fit_none=True) for rule in rules)


def parse_placement_rules(file: YamlFile) -> tuple[PlacementRule, ...]:
    """Parse and check the rules. Raises ConfigError."""
    if not isinstance(file.value, list) or not file.value:
        raise ConfigError(
            f"{file.where}: is {short(file.value)}, expected a list of rules, each with match and some of "
            f"{', '.join(_KEYS[1:])}"
        )
    if len(file.value) > _MAX_RULES:
        raise ConfigError(f"{file.where}: has {len(file.value)} rules, expected {_MAX_RULES} at most")
    return tuple(_rule(each, file.at(index)) for index, each in enumerate(file.value))


def choose_rules(
    rules: Sequence[PlacementRule], modules: Sequence[Module], num_layers: int
) -> list[PlacementRule | None]:
    """The first matching rule of each module, or None.

    Raises ConfigError for a rule that matches none, or only modules that earlier rules took.
    """
    chosen = [next((rule for rule in rules if rule.fits(module, num_layers)), None) for module in modules]
    for rule in rules:
        if rule.may_fit_none or any(each is rule for each in chosen):
            continue
        taken = [
            (module, by) for module, by in zip(modules, chosen, strict=True) if rule.fits(module, num_layers)
        ]
        if taken:
            module, by = taken[0]
            assert by is not None, "it fits, so some rule does"
            raise ConfigError(
                f"{rule.where}: all that this rule fits ({module.name} …) is taken by the rule of {by.where}; the "
                "first that fits counts: put the narrower rule first, or remove this one"
            )
        raise ConfigError(f"{rule.where}: {_why_none(rule, modules, num_layers)}")
    return chosen


def _why_none(rule: PlacementRule, modules: Sequence[Module], num_layers: int) -> str:
    if rule.name is not None and not any(rule.name.search(module.name) for module in modules):
        plain = re.sub(r"\\(.)", r"\1", rule.name.pattern).strip("^$")
        names = list(dict.fromkeys(module.name for module in modules))
        return f"name {short(rule.name.pattern)} fits no module; {_nearest_names(plain, names)}"
    has = sorted(set().union(*(module.classes for module in modules)))
    layers = f"{num_layers} layers of {', '.join(has)}"
    return f"the rule fits no module of this model, which has {layers}; correct or remove it"


def _nearest_names(given: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, names, 3, 0.5) or names[1:4]
    return (
        f"modules of this model are called {', '.join(close)}, … (`twofold rules explain MODEL` lists them)"
    )


def _rule(value: Any, where: str) -> PlacementRule:
    notes: list[str] = []
    if isinstance(value, dict) and "replace" in value:
        value, notes = translated(value, where)
    rule = mapping(value, where, "the rule", _KEYS)
    if "match" not in rule:
        raise ConfigError(
            f"{where}: the rule has no match; give match: all, or some of {', '.join(_MATCH_KEYS)}"
        )
    if len(rule) == 1:
        raise ConfigError(f"{where}: the rule asks for nothing; give some of {', '.join(_KEYS[1:])}")
    match = {} if rule["match"] == "all" else mapping(rule["match"], where, "match", _MATCH_KEYS)
    return PlacementRule(
        where,
        _pattern(match["name"], where) if "name" in match else None,
        _classes(match["class"], where) if "class" in match else None,
        tuple(layer_range(each, where) for each in as_list(match["layers"])) if "layers" in match else None,
        _word(rule.get("device", "auto"), where, "device", DEVICES),
        _format(rule.get("format", FROM_FILE), where),
        _word(rule.get("backend", "auto"), where, "backend", LEVELS),
        _threads(rule["threads"], where) if "threads" in rule else None,
        tuple(notes),
    )


def _pattern(value: Any, where: str) -> re.Pattern[str]:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_PATTERN:
        raise ConfigError(
            f"{where}: match: name is {short(value)}, expected a regular expression of at most {_MAX_PATTERN} letters"
        )
    try:
        return re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: match: name {short(value)} is no regular expression: {error}") from None


def _classes(value: Any, where: str) -> frozenset[str]:
    for each in as_list(value):
        if each not in CLASSES:
            raise ConfigError(f"{where}: match: class is {short(each)}; {nearest(str(each), CLASSES)}")
    return frozenset(as_list(value))


def _word(value: Any, where: str, key: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{where}: {key} is {short(value)}; {nearest(str(value), known)}")
    return str(value)


def _format(value: Any, where: str) -> str | None:
    return None if value == FROM_FILE else known_format(value, where)


def _threads(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_THREADS:
        raise ConfigError(f"{where}: threads is {short(value)}, expected 1 to {_MAX_THREADS}")
    return value
