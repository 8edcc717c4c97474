"""Grammars of a call's arguments, in each of the dialects' forms."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from twofold.api.errors import RequestError
from twofold.text.chat.call_forms import CallForm, pieces
from twofold.text.chat.dialects.gemma_values import GemmaValues
from twofold.text.chat.lark import Lark
from twofold.text.chat.schema_values import ToolSchemas
from twofold.text.chat.tagged_values import TaggedValues
from twofold.text.schemas.enforceable import enforceable_schema
from twofold.text.schemas.normal_form import SchemaError, normal_parameters
from twofold.text.schemas.references import moved

_log = logging.getLogger(__name__)

Schema = Mapping[str, Any]
_IDENTITY: Final = frozenset(("$defs", "definitions", "$schema", "$id"))
_PLAIN_OBJECT: Final = _IDENTITY | {"type", "properties", "required", "additionalProperties"}
_ESCAPES: Final = '"\\nrtbf'
"""JSON escapes that Python strings have too."""


class Parameter(NamedTuple):
    key: str
    schema: Any
    required: bool


class ToolArguments:
    """Allowed arguments of one tool."""

    def __init__(self, tool: Mapping[str, Any], *, constrained: bool) -> None:
        """
        Args:
            tool: in OpenAI's form.
            constrained: constrained by its schema; otherwise any arguments.
        """
        function = tool["function"]
        self.name: str = function["name"]
        self.strict = bool(function.get("strict"))
        self.constrained = constrained
        try:
            given = function.get("parameters")
            # As in OpenAI's API, a function without a schema takes no arguments.
            self._root: Schema = (
                {"additionalProperties": False} if given is None else normal_parameters(given)
            )
            kind = self._root.get("type", "object")
            if kind != "object" and "object" not in kind:
                raise self.refusal(
                    f"parameters have type {json.dumps(kind)[:40]}, but arguments are an object"
                )
            if constrained:
                relaxed = None if self.strict else lambda error: self._relaxed(error.place)
                self._root = enforceable_schema(self._root, relaxed=relaxed)
        except SchemaError as error:
            raise self.refusal(str(error)) from None
        self._kinds = ToolSchemas([{"function": {"name": self.name, "parameters": self._root}}])

    @property
    def document(self) -> Schema:
        """The arguments' schema, for JSON."""
        return {**self._root, "type": "object"} if self.constrained else {"type": "object"}

    def expression(self, lark: Lark, form: CallForm) -> str:
        """Expression of all arguments. RequestError if this form cannot express the schema."""
        if re.fullmatch(form.names, self.name) is None:
            raise self.refusal("this name cannot be written in the model's form of tool calls")
        if form.arguments == "json":
            return lark.json(self.document)
        parameters = self._parameters()
        if form.arguments == "gemma":
            refuse, relaxed = self._unsupported, None if self.strict else self._relaxed
            values = GemmaValues(lark, self._root, form.keys, refuse, relaxed=relaxed)
            return values.any_pairs() if parameters is None else values.pairs(parameters)
        separator = ", " if form.arguments == "python" else ""
        if parameters is None:
            one = self._any_parameter(lark, form)
            return lark.rule(f'({one} ({lark.text(separator)} {one})*)? | ""') if separator else f"{one}*"
        for each in parameters:
            if re.fullmatch(form.keys, each.key) is None:
                raise self.refusal(f"the parameter {each.key[:60]!r} cannot be written in the model's form")
        write = self._keyword if form.arguments == "python" else self._tag
        return lark.sequence([(write(lark, form, each), each.required) for each in parameters], separator)

    def _unsupported(self, what: str) -> NoReturn:
        raise self.refusal(
            f"{what} in its parameters cannot be expressed in the model's form of tool calls; leave it out"
        )

    def refusal(self, reason: str) -> RequestError:
        return RequestError(f"tools: {self.name}: {reason}", param="tools")

    def _parameters(self) -> list[Parameter] | None:
        """Parameters in the schema's order; None: any are allowed."""
        root = self._root
        properties = root.get("properties", {})
        if self.constrained and self.strict and not root.keys() <= _PLAIN_OBJECT:
            odd = sorted(root.keys() - _PLAIN_OBJECT)[0]
            raise self.refusal(
                f"{odd!r} of its parameters cannot be expressed in the model's form of tool calls; leave it or strict "
                "out"
            )
        is_open = not properties and root.get("additionalProperties") is not False
        if (
            not self.constrained
            or not root.keys() <= _PLAIN_OBJECT
            or not isinstance(properties, Mapping)
            or is_open
        ):
            return None
        required = [key for key in root.get("required", ()) if isinstance(key, str)]
        others = [key for key in required if key not in properties]
        return [
            *(Parameter(key, schema, key in required) for key, schema in properties.items()),
            *(Parameter(key, {}, True) for key in others),
        ]

    def _any_parameter(self, lark: Lark, form: CallForm) -> str:
        key = lark.terminal(f"/{form.keys}/")
        if form.arguments == "python":
            return f'{key} "=" {self._json_in_python(lark, {})}'
        before, end, between = form.parameter
        head, _, tail = pieces(before)
        tails = lark.any_of(lark.text(tail.replace("$text", word)) for word in ("true", "false"))
        return f"({lark.text(head)} {key} {tails} {lark.up_to(end)} {lark.text(between)})"

    def _keyword(self, lark: Lark, form: CallForm, parameter: Parameter) -> str:
        schema = parameter.schema
        kind = schema.get("type") if isinstance(schema, Mapping) and schema.keys() <= {"type"} else None
        words = {"boolean": '("True" | "False")', "null": '"None"'}
        value = words.get(kind) if isinstance(kind, str) else None
        if value is None:
            value = self._json_in_python(lark, self._document(parameter.schema))
        return f'{lark.text(parameter.key)} "=" {value}'

    def _json_in_python(self, lark: Lark, schema: Schema) -> str:
        return lark.json(schema, json_allowed_escapes=_ESCAPES)

    def _tag(self, lark: Lark, form: CallForm, parameter: Parameter) -> str:
        before, end, between = form.parameter
        kinds = self._kinds.kinds(self.name, parameter.key)
        head, _, tail = pieces(before.replace("$text", "true" if "string" in kinds or not kinds else "false"))
        values = TaggedValues(
            lark,
            self._root,
            self._document,
            lambda word: self._relaxed(f"properties.{parameter.key}: {word}"),
            line=form.line,
            end=end,
        )
        value = values.value(parameter.schema, kinds)
        if not value:
            raise self.refusal(f"no value of {parameter.key!r} can be written in the model's form")
        return f"({lark.text(head + parameter.key + tail)} {value} {lark.text(between)})"

    def _document(self, schema: Any) -> Schema:
        """A part of the schema as a document of its own, with the definitions it refers to."""
        if not isinstance(schema, Mapping):
            return {} if schema is not False else {"type": "string", "enum": []}
        if '"$ref"' not in json.dumps(schema):
            return schema
        root = {key: value for key, value in self._root.items() if key not in ("$id", "$schema")}
        place = "#/$defs/tool"
        return {**moved(schema, place), "$defs": {"tool": moved(root, place)}}

    def _relaxed(self, place: str) -> None:
        _report_relaxed(self.name, place)


@functools.lru_cache(maxsize=256)
def _report_relaxed(tool: str, place: str) -> None:
    """Log once per tool and keyword: agents send their tools with every request."""
    _log.warning(
        "tool %s: %s is not enforced: the grammar of the model's calls cannot express it", tool, place
    )
