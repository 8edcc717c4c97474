"""Detects a model's dialects from its own chat template. Nothing is guessed: a template without a dialect's signs has
none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from twofold.api.errors import ConfigError
from twofold.text.chat.dialects import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    tokens_of,
)

NO_PARSER: Final = "none"
"""Explicit choice of no parser, whatever the template contains."""


@dataclass(frozen=True)
class ChatMarks:
    """How one model marks reasoning and tool calls in its answers."""

    tool_call_parser: str | None = None
    """A name of TOOL_PARSERS; None: the template has no calls in a known dialect."""
    reasoning_parser: str | None = None
    """A name of REASONING_PARSERS; None: the template has no reasoning."""
    end_of_turn: tuple[str, ...] = ()
    """Tokens that end the model's turn, besides those that its files declare."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """The marks around the model's reasoning; None: it has none."""
        dialect = REASONING_PARSERS.get(self.reasoning_parser or "")
        return (dialect.begins[0], dialect.ends[0]) if dialect is not None and dialect.begins else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Marks that the parsers need, although they may be special tokens of the vocabulary."""
        return tokens_of(self.tool_call_parser, self.reasoning_parser)

    def calls_tools(self, template_variables: frozenset[str]) -> bool:
        """Whether a model with these marks can call tools, given the variable names that its chat template reads."""
        return self.tool_call_parser is not None and "tools" in template_variables

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to `prompt` begins inside the reasoning: opened by the template, or by the message to be
        continued."""
        if self.thinking is None:
            return False
        begin, end = (mark.strip() for mark in self.thinking)
        return prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end)

    def closed_by(self, prompt: str, continued: str = "") -> bool:
        """Whether the reasoning is finished where the answer to `prompt` begins, so that none may follow."""
        if self.thinking is None:
            return False
        begin, end = (mark.strip() for mark in self.thinking)
        return prompt.rstrip().endswith(end) or continued.rfind(end) > continued.rfind(begin)


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for an unknown parser name."""
    parsers = (
        ("--tool-call-parser", tool_call_parser, TOOL_PARSERS | TOOL_ALIASES),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS | REASONING_ALIASES),
    )
    for flag, name, known in parsers:
        if name is not None and name != NO_PARSER and name not in known:
            raise ConfigError(
                f"{flag} is {name!r}, expected {NO_PARSER} or one of {', '.join(known)}; leave it out to detect the "
                "parser from the chat template"
            )


def chosen_marks(shown: ChatMarks, tool_call_parser: str | None, reasoning_parser: str | None) -> ChatMarks:
    """The template's dialects, overridden by the chosen parsers. ConfigError as `check_parsers`."""
    check_parsers(tool_call_parser, reasoning_parser)

    def chosen(name: str | None, default: str | None, aliases: Mapping[str, tuple[str, ...]]) -> str | None:
        if name is None or name == NO_PARSER:
            return default if name is None else None
        dialects = aliases.get(name, (name,))
        return default if default in dialects else dialects[0]

    return replace(
        shown,
        tool_call_parser=chosen(tool_call_parser, shown.tool_call_parser, TOOL_ALIASES),
        reasoning_parser=chosen(reasoning_parser, shown.reasoning_parser, REASONING_ALIASES),
    )


@dataclass(frozen=True)
class FamilyChat:
    """Dialects of a model family's publishers: a model has the first one whose signs its template contains."""

    tools: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    end_of_turn: tuple[str, ...] = ()

    def marks_of(self, template: str | None) -> ChatMarks:
        """The marks of a model with this chat template."""
        if template is None:
            return ChatMarks(end_of_turn=self.end_of_turn)
        tool = (name for name in self.tools if all(sign in template for sign in TOOL_PARSERS[name].signs))
        thinking = (
            name for name in self.reasoning if all(sign in template for sign in REASONING_PARSERS[name].signs)
        )
        return ChatMarks(next(tool, None), next(thinking, None), self.end_of_turn)
