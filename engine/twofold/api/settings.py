"""Settings as fields of frozen dataclasses that carry their help: source of flags, environment names and tables.

A flag overrides the environment; the environment overrides the default. This module defines no setting itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar, Union

from twofold.api.errors import ConfigError

T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    positional: bool = False,
    empty_counts: bool = False,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    several: bool = False,
    also: str = "",
    scheduler_option: bool = False,
) -> Any:
    """Dataclass field of a setting: default, help and allowed values in one place.

    A field of type `tuple[str, ...]` collects the values of a repeated flag; one of type `bool` also has a flag with
    `no-` before its name.

    Args:
        positional: the setting is a positional argument instead of a flag.
        empty_counts: an empty environment variable is a value; otherwise it means the default.
        choices: allowed values of a string setting.
        low, high: smallest and largest number. None as a value is always allowed where it is the default.
        several: the flag of a tuple takes several values each time it is given.
        also: name of a further environment variable (another engine's), read last.
        scheduler_option: the value is the layer scheduler's option of the same name.
    """
    metadata = {
        "help": help,
        "positional": positional,
        "empty_counts": empty_counts,
        "also": also,
        "choices": choices,
        "low": low,
        "high": high,
        "several": several,
        "scheduler_option": scheduler_option,
    }
    return dataclasses.field(default=default, metadata=metadata)


_BOOLEANS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def environment_name(field: str) -> str:
    return f"TWOFOLD_{field.upper()}"


def flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def fields_by_class(cls: type[Any]) -> list[tuple[type[Any], list[dataclasses.Field[Any]]]]:
    """Fields of a configuration by class: its own first, then those of each base class."""
    made_of = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return [
        (base, [fields[name] for name in inspect.get_annotations(base) if name in fields]) for base in made_of
    ]


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Any], details: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add one flag per field of `cls` (positional where the field says so) with the field's own help.

    details: text to append to a field's help, by field name.
    """
    hints = typing.get_type_hints(cls)
    for part, fields in fields_by_class(cls):
        group = parser.add_argument_group((part.__doc__ or part.__name__).split("\n", 1)[0].rstrip("."))
        for field in fields:
            _add_argument(group, field, hints[field.name], details.get(field.name))


def _add_argument(group: Any, field: dataclasses.Field[Any], hint: Any, detail: str | None) -> None:
    help_text = ": ".join(filter(None, (field.metadata["help"], detail))).replace("%", "%%")
    if field.default not in (None, "", ()) and "default" not in help_text:
        help_text += f" (default: {field.default})"
    common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text, "metavar": field.name.upper()}
    if field.metadata["positional"]:
        nargs = "*" if typing.get_origin(hint) is tuple else "?"
        group.add_argument(field.name, nargs=nargs, **common)
    elif hint is bool:
        del common["metavar"]
        group.add_argument(
            flag_name(field.name), dest=field.name, action=argparse.BooleanOptionalAction, **common
        )
    else:
        action = "append" if typing.get_origin(hint) is tuple else "store"
        if field.metadata["several"]:
            action, common["nargs"] = "extend", "+"
        group.add_argument(flag_name(field.name), dest=field.name, action=action, **common)


def from_namespace(cls: type[T], namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> T:
    """Build `cls` from parsed flags, then the environment, then defaults.

    Raises:
        ConfigError: a value does not parse as the field's type, or is out of range.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        given = getattr(namespace, field.name, None)
        if given is not None:
            source = field.name if field.metadata["positional"] else flag_name(field.name)
            values[field.name] = _parse(given, hints[field.name], source)
            continue
        name = environment_name(field.name)
        if field.metadata["also"] and not environ.get(name):
            name = field.metadata["also"]
        if environ.get(name) or (name in environ and field.metadata["empty_counts"]):
            values[field.name] = _parse(environ[name], hints[field.name], name)
    return cls(**values)


def given_fields(
    cls: type[Any], namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> frozenset[str]:
    """Names of the fields that a flag or the environment sets."""
    return frozenset(
        field.name
        for field in dataclasses.fields(cls)
        if getattr(namespace, field.name, None) is not None or environ.get(environment_name(field.name))
    )


def _parse(given: Any, hint: Any, source: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return tuple(given) if isinstance(given, list) else (given,)
    text = str(given)
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{source} was given {text!r}; it takes 1 or 0, true or false, on or off")
        return _BOOLEANS[text.lower()]
    if typing.get_origin(hint) in (Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    try:
        return hint(text)
    except ValueError:
        kind = {"int": "a whole number", "float": "a number"}.get(hint.__name__, hint.__name__)
        raise ConfigError(f"{source} was given {text!r}; it takes {kind}") from None


class Checked:
    """Base of configurations: refuses values outside the choices and ranges of their fields.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, choices = getattr(self, field.name), field.metadata["choices"]
            low, high = field.metadata["low"], field.metadata["high"]
            if value is None and field.default is None:
                continue
            if choices:
                check(value in choices, field.name, value, _listed(choices))
            if low is not None:
                within = low <= value and (high is None or value <= high)
                check(within, field.name, value, _range(low, high))


def _listed(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def _range(low: float, high: float | None) -> str:
    if high is None:
        return f"{low} or more"
    return f"{'a whole number' if isinstance(low, int) else 'a number'} from {low} to {high}"


def check(ok: bool, field: str, value: object, expected: str) -> None:
    """Refuse a field's value, naming its flag.

    Raises:
        ConfigError: it is not `ok`.
    """
    if not ok:
        raise ConfigError(f"{flag_name(field)} was given {value!r}; it takes {expected}")
