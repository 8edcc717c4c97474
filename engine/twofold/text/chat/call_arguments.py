"""Grammars of a call's arguments, in each of the dialects' forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from twofold.api.errors import RequestError
from twofold.text.chat.call_forms import CallForm, pieces
from twofold.text.chat.dialects.gemma_values import GemmaValues
from twofold.text.chat.lark import Lark
from twofold.text.chat.schema_values import ToolSchemas, resolved

Schema = Mapping[str, Any]
_NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly")
)
_IDENTITY: Final = frozenset(("$defs", "definitions", "$schema", "$id"))
_PLAIN_OBJECT: Final = _NOTES | _IDENTITY | {"type", "properties", "required", "additionalProperties"}
_PLAIN_TYPES: Final = frozenset(("string", "integer", "number", "boolean", "null"))
_DATA: Final = frozenset(("const", "enum", "default", "examples"))
_SCHEMAS_BY_NAME: Final = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
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
        self._constrained = constrained
        self._kinds = ToolSchemas([tool])
        # As in OpenAI's API, a function without a schema takes no arguments.
        given = function.get("parameters")
        self._root: Schema = {"properties": {}, "additionalProperties": False} if given is None else given
        kind = self._root.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise self.refusal(f"parameters have type {json.dumps(kind)[:40]}, but arguments are an object")

    def expression(self, lark: Lark, form: CallForm) -> str:
        """Expression of all arguments. RequestError if this form cannot express the schema."""
        if re.fullmatch(form.names, self.name) is None:
            raise self.refusal("this name cannot be written in the model's form of tool calls")
        if form.arguments == "json":
            return lark.json({**self._root, "type": "object"} if self._constrained else {"type": "object"})
        parameters = self._parameters()
        if form.arguments == "gemma":
            values = GemmaValues(lark, self._root, form.keys, self._unsupported)
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
        if self._constrained and self.strict and not root.keys() <= _PLAIN_OBJECT:
            odd = sorted(root.keys() - _PLAIN_OBJECT)[0]
            raise self.refusal(
                f"{odd!r} of its parameters cannot be expressed in the model's form of tool calls; leave it or strict "
                "out"
            )
        is_open = not properties and root.get("additionalProperties") is not False
        if (
            not self._constrained
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
        kind = (
            schema.get("type") if isinstance(schema, Mapping) and schema.keys() <= _NOTES | {"type"} else None
        )
        words = {"boolean": '("True" | "False")', "null": '"None"'}
        value = words.get(kind) if isinstance(kind, str) else None
        if value is None:
            value = self._json_in_python(lark, self._document(parameter))
        return f'{lark.text(parameter.key)} "=" {value}'

    def _json_in_python(self, lark: Lark, schema: Schema) -> str:
        return lark.json(schema, json_allowed_escapes=_ESCAPES)

    def _tag(self, lark: Lark, form: CallForm, parameter: Parameter) -> str:
        before, end, between = form.parameter
        kinds = self._kinds.kinds(self.name, parameter.key)
        head, _, tail = pieces(before.replace("$text", "true" if "string" in kinds or not kinds else "false"))
        return (
            f"({lark.text(head + parameter.key + tail)} {self._tagged(lark, form, parameter, end)} "
            f"{lark.text(between)})"
        )

    def _tagged(self, lark: Lark, form: CallForm, parameter: Parameter, end: str) -> str:
        """A value and its end tag."""
        kinds = self._kinds.kinds(self.name, parameter.key)
        schema = self._resolved(parameter.schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
            texts = [each for each in texts if end not in each]
            if not texts:
                raise self.refusal(f"no value of {parameter.key!r} can be written in the model's form")
            return f"{lark.any_of(map(lark.text, texts))} {lark.text(form.line + end)}"
        if kinds and "string" not in kinds:
            return f"{lark.json(self._document(parameter))} {lark.text(form.line + end)}"
        if self.strict and not _is_plain(schema):
            raise self.refusal(
                f"the text of {parameter.key!r} can only be constrained to its type or an enum in the model's form of "
                "tool calls; leave strict or the other keywords out"
            )
        return lark.up_to(end)

    def _resolved(self, schema: Any) -> Schema:
        for _ in range(8):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            schema = resolved(self._root, reference)
        return schema if isinstance(schema, Mapping) else {}

    def _document(self, parameter: Parameter) -> Schema:
        """A parameter's schema as a document of its own, with the definitions it refers to."""
        schema = parameter.schema
        if not isinstance(schema, Mapping):
            return {} if schema is not False else {"type": "string", "enum": []}
        if '"$ref"' not in json.dumps(schema):
            return schema
        place = parameter.key.replace("~", "~0").replace("/", "~1")
        root = {key: value for key, value in self._root.items() if key not in ("$id", "$schema")}
        return {"$ref": f"#/$defs/tool/properties/{place}", "$defs": {"tool": _moved(root)}}


def _moved(schema: Any) -> Any:
    """A schema with its references to the root redirected to #/$defs/tool."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            moved[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(each) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#/$defs/tool{value[1:]}"
        else:
            moved[key] = _moved(value)
    return moved


def _is_plain(schema: Schema) -> bool:
    """Whether the schema only lists plain types."""
    members = [each for key in ("anyOf", "oneOf") for each in schema.get(key, ())]
    types = schema.get("type", [])
    types = {types} if isinstance(types, str) else set(types)
    return (
        schema.keys() <= _NOTES | {"type", "anyOf", "oneOf"}
        and types <= _PLAIN_TYPES
        and all(isinstance(each, Mapping) and _is_plain(each) for each in members)
    )
