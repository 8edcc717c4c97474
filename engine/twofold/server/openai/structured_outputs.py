"""OpenAI's and vLLM's fields for structured output, and the single constraint derived from them.

Contents are checked when compiled; here only that there is one constraint, and of which kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from twofold.api.constraints import Constraint, ConstraintKind

MAX_CHOICES_TO_MATCH: Final = 1024
MAX_WHITESPACE_PATTERN: Final = 256
ANY_OBJECT: Final = '{"type": "object"}'

Schema = dict[str, Any] | bool
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICES_TO_MATCH, fail_fast=True),
]
GrammarText = Annotated[str, Field(min_length=1)]
WhitespacePattern = Annotated[str, Field(max_length=MAX_WHITESPACE_PATTERN)]


class _Strict(BaseModel):
    """Base that refuses unknown fields, because they might change the output's form."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class JsonSchemaFormat(_Strict):
    """OpenAI's wrapper of a schema. The schema is always enforced, strict or not."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's response_format. Some servers take a schema beside json_object; it is enforced too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError(
                "type json_schema needs json_schema: {name, schema}; send it, or type json_object"
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"json_schema was sent with type {self.type!r}; send type 'json_schema'")
        if self.type != "json_object" and self.schema_ is not None:
            raise ValueError("put schema into json_schema: {name, schema}")
        return self

    def constraints(self) -> Iterator[tuple[ConstraintKind, str]]:
        if self.json_schema is not None:
            yield "json_schema", json.dumps(self.json_schema.schema_)
        elif self.type == "json_object":
            yield "json_schema", ANY_OBJECT if self.schema_ is None else json.dumps(self.schema_)


class StructuredOutputs(_Strict):
    """vLLM's structured_outputs."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    whitespace_pattern: WhitespacePattern | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        requested = [kind for kind, _ in self.constraints()]
        if len(requested) != 1:
            raise ValueError(
                f"asks for {len(requested)} forms; send one of json, regex, choice, grammar, json_object"
            )
        return self

    def constraints(self) -> Iterator[tuple[ConstraintKind, str]]:
        if self.json_ is not None:
            yield "json_schema", schema_text(self.json_)
        if self.regex is not None:
            yield "regex", self.regex
        if self.choice is not None:
            yield "choice", json.dumps(self.choice)
        if self.grammar is not None:
            yield "grammar", self.grammar
        if self.json_object:
            yield "json_schema", ANY_OBJECT

    @property
    def whitespace(self) -> str | None:
        """Value for `Constraint.whitespace_pattern`."""
        return "" if self.disable_any_whitespace else self.whitespace_pattern


class StructuredFields(BaseModel):
    """Request fields for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: WhitespacePattern | None = None

    @property
    def constraints(self) -> list[Constraint]:
        """All requested constraints; a request may have one."""
        whitespace = self.guided_whitespace_pattern
        found: list[tuple[ConstraintKind, str, str | None, str]] = []
        if self.response_format is not None:
            found += [(*each, whitespace, "response_format") for each in self.response_format.constraints()]
        if (outputs := self.structured_outputs) is not None:
            found += [(*each, outputs.whitespace, "structured_outputs") for each in outputs.constraints()]
        if self.guided_json is not None:
            found.append(("json_schema", schema_text(self.guided_json), whitespace, "guided_json"))
        if self.guided_regex is not None:
            found.append(("regex", self.guided_regex, None, "guided_regex"))
        if self.guided_choice is not None:
            found.append(("choice", json.dumps(self.guided_choice), None, "guided_choice"))
        if self.guided_grammar is not None:
            found.append(("grammar", self.guided_grammar, None, "guided_grammar"))
        return [Constraint(kind, text, pattern, field=field) for kind, text, pattern, field in found]

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer."""
        return next(iter(self.constraints), None)


def schema_text(schema: Schema | str) -> str:
    """The schema as JSON; vLLM's clients send an object or its JSON."""
    return schema if isinstance(schema, str) else json.dumps(schema)
