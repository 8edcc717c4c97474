"""Translation of KTransformers' YAML rules (match and replace) to ours, as far as they have a counterpart."""

from __future__ import annotations

from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.rules.yaml_file import nearest, short

_RULE_KEYS: Final = ("match", "replace", "recursive")
_REPLACE_KEYS: Final = ("class", "kwargs")
_KWARGS: Final = ("generate_device", "backend")
_FORMATS: Final = {"AMXInt8": "int8", "AMXInt4": "int4", "AMXBF16": "bf16"}


def translated(rule: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """A rule with `replace` translated to our keys, and notes about the translation.

    generate_device becomes device, kwargs' backend a format. A KTransformers class name, or a key without a
    counterpart, is refused: a partly understood rule is worse than none. Raises ConfigError that begins with `where`.
    """
    _known(rule, _RULE_KEYS, where, "a rule with replace (KTransformers' form)")
    replace = rule["replace"]
    if not isinstance(replace, dict):
        raise ConfigError(f"{where}: replace is {short(replace)}, expected {', '.join(_REPLACE_KEYS)}")
    _known(replace, _REPLACE_KEYS, where, "replace")
    kwargs = replace.get("kwargs") or {}
    if not isinstance(kwargs, dict) or not kwargs:
        named = f"class {short(replace['class'])}" if "class" in replace else "nothing"
        raise ConfigError(
            f"{where}: replace asks for {named} and no kwargs; operators are not chosen by class here: say "
            "device, format "
            "or threads of the modules instead (docs/guides/placement-rules.md)"
        )
    _known(kwargs, _KWARGS, where, "replace: kwargs")
    made: dict[str, Any] = {"match": rule.get("match")}
    notes = []
    if "class" in replace and replace["class"] != "default":
        notes.append(
            f"replace: class {short(replace['class'])} is not needed, operators follow from the model"
        )
    if "generate_device" in kwargs:
        made["device"] = _device(kwargs["generate_device"], where)
        notes.append(
            f"generate_device {short(kwargs['generate_device'])} is read as device: {made['device']}"
        )
    if "backend" in kwargs:
        backend = kwargs["backend"]
        if backend not in _FORMATS:
            raise ConfigError(
                f"{where}: replace: kwargs: backend is {short(backend)}; {nearest(str(backend), _FORMATS)}"
            )
        made["format"] = _FORMATS[backend]
        notes.append(f"backend {backend} is read as format: {made['format']}")
    return made, notes


def _device(value: Any, where: str) -> str:
    text = str(value)
    if text == "cpu":
        return "cpu"
    if text in ("cuda", "cuda:0"):
        return "gpu"
    raise ConfigError(
        f"{where}: replace: kwargs: generate_device is {short(value)}; it takes cpu, cuda, cuda:0 (there is one device)"
    )


def _known(given: dict[str, Any], keys: tuple[str, ...], where: str, what: str) -> None:
    for key in given:
        if key not in keys:
            raise ConfigError(
                f"{where}: {what} has {short(key)}, which has no counterpart here; {nearest(key, keys)}"
            )
