"""What a model's own chat template says of its dialects. Nothing is guessed: a template without a dialect's signs has
none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from twofold.api.errors import ConfigError
from twofold.chat.dialects import REASONING_PARSERS, TOOL_PARSERS, tokens_of

NO_PARSER: Final = "none"
"""Chosen: nothing is read, whatever the template shows."""


@dataclass(frozen=True)
class ChatMarks:
    """How one model marks what is not plain text in its answers."""

    tool_call_parser: str | None = None
    """A name of TOOL_PARSERS; None: its template shows no calls in a dialect that is known."""
    reasoning_parser: str | None = None
    """A name of REASONING_PARSERS; None: its template shows no thinking."""
    end_of_turn: tuple[str, ...] = ()
    """Tokens that end its turn, besides what its files call an end."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """The marks around its thinking, where it has such."""
        dialect = REASONING_PARSERS.get(self.reasoning_parser or "")
        return (dialect.begins[0], dialect.ends[0]) if dialect is not None and dialect.begins else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Marks that the parsers must see, although a vocabulary may have them as special tokens."""
        return tokens_of(self.tool_call_parser, self.reasoning_parser)

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to `prompt` begins inside the thinking: the template has opened it, or the message to be
        continued has."""
        if self.thinking is None:
            return False
        begin, end = (mark.strip() for mark in self.thinking)
        return prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end)


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """ConfigError for a name of a parser that there is not."""
    asked = (
        ("--tool-call-parser", tool_call_parser, TOOL_PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    )
    for flag, name, known in asked:
        if name is not None and name != NO_PARSER and name not in known:
            raise ConfigError(
                f"{flag} is {name!r}, expected {NO_PARSER} or one of {', '.join(known)}; leave it out for what the "
                "model's chat template shows"
            )


def chosen_marks(shown: ChatMarks, tool_call_parser: str | None, reasoning_parser: str | None) -> ChatMarks:
    """What the template shows, but for the parsers that somebody chose. ConfigError as `check_parsers`."""
    check_parsers(tool_call_parser, reasoning_parser)

    def chosen(name: str | None, default: str | None) -> str | None:
        return default if name is None else None if name == NO_PARSER else name

    tool, thinking = (
        chosen(tool_call_parser, shown.tool_call_parser),
        chosen(reasoning_parser, shown.reasoning_parser),
    )
    return replace(shown, tool_call_parser=tool, reasoning_parser=thinking)


@dataclass(frozen=True)
class FamilyChat:
    """The dialects that a family's publishers use: a model speaks the first whose signs its template has."""

    tools: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    end_of_turn: tuple[str, ...] = ()

    def marks_of(self, template: str | None) -> ChatMarks:
        """Those of a model with this chat template."""
        if template is None:
            return ChatMarks(end_of_turn=self.end_of_turn)
        tool = (name for name in self.tools if all(sign in template for sign in TOOL_PARSERS[name].signs))
        thinking = (
            name for name in self.reasoning if all(sign in template for sign in REASONING_PARSERS[name].signs)
        )
        return ChatMarks(next(tool, None), next(thinking, None), self.end_of_turn)
