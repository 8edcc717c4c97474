"""YAML reader for rule files: bounded, never evaluated, with line numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from twofold.api.errors import ConfigError
from twofold.api.regular_file import read_regular

MAX_BYTES: Final = 256 * 1024
_MAX_DEPTH: Final = 16
_SCALARS: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class YamlFile:
    """Parsed file: plain dicts, lists and scalars."""

    where: str
    value: Any
    lines: Mapping[Path_, int]
    """Line numbers, from 1, by keys and indices."""

    def at(self, *keys: str | int) -> str:
        """Location "FILE:LINE" of the value at these keys."""
        return f"{self.where}:{self.lines.get(keys, 1)}"


def read_yaml(path: Path) -> YamlFile:
    """Read and parse a file. Raises ConfigError if it is too large, too deep, no YAML, or more than plain values."""
    try:
        data, size = read_regular(path, MAX_BYTES)
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; give a rule file")
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> YamlFile:
    """Parse a file's text; `where` names the file."""
    try:
        _check_events(text, where)
        node = yaml.compose(text, yaml.SafeLoader)
        lines: dict[Path_, int] = {}
        value = None if node is None else _value_of(node, where, (), lines)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())[:200]}") from None
    return YamlFile(where, value, lines)


def nearest(given: str, known: Iterable[str]) -> str:
    """Suggestion for a message: the closest known value, and all of them."""
    known = tuple(known)
    close = difflib.get_close_matches(given, known, 1)
    return (
        f"did you mean {close[0]!r}? It takes {', '.join(known)}" if close else f"it takes {', '.join(known)}"
    )


def short(value: Any) -> str:
    """A value, shortened for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_events(text: str, where: str) -> None:
    """Check limits before anything is built: an alias may expand to a billion nodes."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where}:{line}: has an alias (*{event.anchor}); write out what it stands for")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise ConfigError(f"{where}:{line}: nested more than {_MAX_DEPTH} deep; give a rule file")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _value_of(node: yaml.Node, where: str, path: Path_, lines: dict[Path_, int]) -> Any:
    line = node.start_mark.line + 1
    lines[path] = line
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return [_value_of(each, where, (*path, index), lines) for index, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        made: dict[str, Any] = {}
        for key_node, of_key in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    f"{where}:{key_node.start_mark.line + 1}: not YAML: a key that is no scalar"
                )
            key = str(key_node.value)
            if key in made:
                raise ConfigError(f"{where}:{key_node.start_mark.line + 1}: {key!r} is there twice; keep one")
            made[key] = _value_of(of_key, where, (*path, key), lines)
        return made
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        raise ConfigError(f"{where}:{line}: not YAML of plain values: {node.tag} is not read")
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node)
    finally:
        constructor.dispose()
